"""Flax ViTs compute the same here: their modules, their names, our logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from cropr_jax import models
from cropr_jax.convert.load import load

MODEL = {
    "width": 16,
    "depth": 2,
    "heads": 2,
    "patch": 4,
    "image_size": (8, 12),
    "num_classes": 5,
    "pool": "cls",
    "mlp_ratio": 2.0,
}


class Reference(nn.Module):
    """A ViT with CLS as the two code bases have it, but with the exact GELU.

    Attributes:
      numbers: of attention, second norm and MLP in the names.
      early: whether CLS is there when positions are added (vision_transformer).
    """

    numbers: tuple[int, int, int]
    early: bool

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(16, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(images)
        x = x.reshape(len(x), -1, 16)
        cls = self.param("cls", nn.initializers.normal(), (1, 1, 16))
        cls = jnp.tile(cls, (len(x), 1, 1))
        if self.early:
            x = Encoder(self.numbers, True, name="Transformer")(jnp.concatenate([cls, x], axis=1))
        else:
            x = x + self.param("pos_embedding", nn.initializers.normal(), (1, x.shape[1], 16))
            x = Encoder(self.numbers, False, name="Transformer")(jnp.concatenate([cls, x], axis=1))
        return nn.Dense(5, kernel_init=nn.initializers.normal(), name="head")(x[:, 0])


class Encoder(nn.Module):
    numbers: tuple[int, int, int]
    positions: bool

    @nn.compact
    def __call__(self, x):
        if self.positions:
            x = AddPositions(name="posembed_input")(x)
        for i in range(2):
            x = EncoderBlock(self.numbers, name=f"encoderblock_{i}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class AddPositions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("pos_embedding", nn.initializers.normal(), (1, *x.shape[1:]))


class EncoderBlock(nn.Module):
    numbers: tuple[int, int, int]

    @nn.compact
    def __call__(self, x):
        attention, norm, mlp = self.numbers
        y = nn.LayerNorm(name="LayerNorm_0")(x)
        x = x + nn.MultiHeadDotProductAttention(
            2, name=f"MultiHeadDotProductAttention_{attention}"
        )(y, y)
        y = nn.LayerNorm(name=f"LayerNorm_{norm}")(x)
        return x + MlpBlock(name=f"MlpBlock_{mlp}")(y)


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(32)(x), approximate=False)
        return nn.Dense(16)(x)


@pytest.mark.parametrize(
    ("kind", "numbers"), [("vision_transformer", (1, 2, 3)), ("big_vision", (0, 1, 0))]
)
def test_logits_of_their_modules(tmp_path, kind, numbers):
    reference = Reference(numbers, kind == "vision_transformer")
    draw = np.random.default_rng(0)
    images = draw.normal(size=(2, 8, 12, 3)).astype(np.float32)
    shapes = jax.eval_shape(lambda: reference.init(jax.random.key(1), images))["params"]
    params = jax.tree.map(lambda leaf: np.float32(0.3 * draw.normal(size=leaf.shape)), shapes)
    logits = jax.device_get(jax.jit(reference.apply)({"params": params}, images))
    np.savez(tmp_path / "x.npz", **traverse_util.flatten_dict(params, sep="/"))
    model = models.create(MODEL)
    loaded = load(str(tmp_path / "x.npz"), model)
    assert loaded.kind == kind and not loaded.notes()
    ours = traverse_util.unflatten_dict(loaded.params, sep="/")
    found, _ = jax.jit(lambda p, x: model.apply({"params": p}, x))(ours, images)
    np.testing.assert_allclose(found, logits, atol=2e-5)
    assert np.std(logits) > 0.1
