"""Names of classes and files in pictures: shown as they are, whatever stands in them."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from cropr_jax.host.messages import printable
from cropr_jax.visualize import pruning, segmentation

ODD = [
    "usd_$: found cad_$",
    "$x^{2",
    "50 %",
    "_private",
    "a\\b",
    "{",
    "\U0001f600",
    "\u05e9\u05dc\u05d5\u05dd",
    "na\udce9ve",
    "line\nbreak",
    "x" * 300,
    " ",
]


@pytest.fixture
def texts(monkeypatch):
    """All texts of the figures that are saved."""
    found, real = [], Figure.savefig

    def seen(figure, *args, **options):
        real(figure, *args, **options)
        found.extend(text.get_text() for text in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", seen)
    return found


@pytest.mark.parametrize("name", ODD)
def test_names_of_classes(name, tmp_path, texts):
    images = np.zeros((1, 8, 8, 3), np.uint8)
    after = np.zeros((1, 2, 2), int)
    pruning.pruning_figure(images, after, 1, [name], tmp_path / "a.png")
    maps = [np.zeros((8, 8), np.uint8)]
    segmentation.segmentation_figure(
        list(images), maps, None, None, 1, (name, "other"), tmp_path / "b.png"
    )
    shown = printable(name) if len(name) < 80 else f"{name[:77]}..."
    assert texts.count(shown) >= 2
    for file in ("a.png", "b.png"):
        with Image.open(tmp_path / file) as picture:
            assert picture.size[0] > 10


def test_what_no_encoding_has_is_escaped():
    assert printable("na\udce9ve") == "na\\udce9ve" and printable("na\u00efve $") == "na\u00efve $"
