"""What a written picture shows: its axes, and the colours of the file at places in them."""

import numpy as np
from matplotlib.figure import Figure
from PIL import Image


class Picture:
    """A picture and the figure that it was made of.

    Attributes:
      axes: of the figure, in the order in which they were made.
      pixels: RGB of the file, in 0..255.
    """

    def __init__(self, figure, path):
        self.axes = figure.axes
        with Image.open(path) as file:
            self.pixels = np.asarray(file.convert("RGB")).astype(int)

    def color(self, axis, x, y):
        """Colour of the file at a point of an axis, in the axis's own units."""
        return self.around(axis, x, y, 0)[0, 0]

    def around(self, axis, x, y, reach=2):
        """Colours of the file up to so many pixels from a point of an axis."""
        column, row = map(int, axis.transData.transform((x, y)))
        row = len(self.pixels) - 1 - row
        return self.pixels[row - reach : row + reach + 1, column - reach : column + reach + 1]

    def titles(self):
        """Titles of all axes that have one."""
        return [title for axis in self.axes if (title := axis.get_title(loc="left"))]


def drawn(monkeypatch, module, draw, path):
    """The picture that `draw` writes to `path` by the figure of a module."""
    figures = []

    class Remembered(Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            figures.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(module, "Figure", Remembered)
        draw(path)
    (figure,) = figures
    return Picture(figure, path)
