"""Figures as files, their texts as they stand."""

import warnings
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from cropr_jax.host.messages import printable

# Characters of a text; longer ones would leave no room for the picture.
MOST = 80


def save(figure: Figure, path: str | Path, **options: Any) -> None:
    """Writes a figure.

    Names of classes and files are no mathematics, whatever `$` and `_` stand in them; what no
    encoding has is escaped, and what the font has not is an empty box.

    Args:
      figure: with a canvas.
      path: of the file, whose suffix is the format.
      **options: of `Figure.savefig`.
    """
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        words = printable(text.get_text())
        text.set_text(words if len(words) <= MOST else f"{words[: MOST - 3]}...")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, **options)
