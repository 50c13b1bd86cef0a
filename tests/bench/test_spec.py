"""What to time: words that no model can have end in one line, before anything is made."""

import pytest

from cropr_jax import models
from cropr_jax.bench import spec
from cropr_jax.errors import ConfigError


@pytest.mark.parametrize(("word", "message"), [
    ("r=nine", "reduction.rate: found 'nine', expected a whole number from 0"),
    ("r=-1", "reduction.rate: found -1"),
    ("res=abc", "image_size: found 'abc', expected a whole number"),
    ("res=-16", "image_size: found -16"),
    ("res=0x224", "image_size: found (0, 224)"),
    ("res=1.5", "image_size: found 1.5"),
    ("depth=x", "depth: found 'x'"),
    ("width=0", "width: found 0"),
    ("patch=0", "patch: found 0"),
    ("patch=1000", "image_size: (224, 224) is not a multiple of the patch (1000, 1000)"),
    ("heads=0", "heads: found 0"),
    ("heads=7", "heads: 7 heads do not divide the width 192"),
    ("classes=-1", "num_classes: found -1"),
    ("mlp_ratio=nan", "mlp_ratio: found nan, expected a number above 0 and up to 64"),
    ("schedule=linear", "reduction.schedule: found 'linear', expected one of 'per_block'"),
    ("reduction=cropr", "reduction: found 'cropr', expected a section"),
])  # fmt: skip
def test_a_wrong_word_is_one_line(word, message):
    with pytest.raises(ConfigError) as said:
        fields = spec.parse_variant(f"vit_ti,{word}")
        models.create(spec.with_reduction(fields, "random"))
    assert str(said.value).startswith(f"config.model.{message}")
    assert "\n" not in str(said.value)
