"""The predictor: the slim form of a model, compiled once for each shape.

For segmentation see `cropr_jax.segment`, whose predictor `load` then returns.

    import cropr_jax
    predictor = cropr_jax.load("runs/digits")
    logits = predictor(images)                                   # [b, c]
    logits = predictor(["cat.jpg", "dog.jpg"], preprocess=True)
    logits, out = predictor.predict(images)                      # with kept and pruned tokens

Letters: b images, c classes, h and w the patch grid.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cropr_jax import models, rng
from cropr_jax.errors import CheckpointError, ConfigError
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.models.vit import ViT
from cropr_jax.slim import cast_params, slim_leaves

if TYPE_CHECKING:
    from PIL import Image

# What `predict` returns beside the logits, where the method has it.
OUTPUTS = ("kept", "pruned", "pruned_after", "group")


class Predictor:
    """Classifies images with a pruned model, or, of segmentation, their patches.

    Attributes:
      model: slim form.
      params: its parameters on the device, cast to the compute dtype once.
      preprocess: `config.preprocess`, or None.
      class_names: by label; empty if unknown.
    """

    def __init__(
        self,
        model: ViT,
        params: Mapping[str, Any],
        preprocess: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
    ):
        """Use `Predictor.from_model`, unless model and parameters are slim already.

        Raises:
          ConfigError: if the model is not slim.
        """
        if not model.slim:
            raise ConfigError("Predictor: the model is in its training form; use from_model")
        self.model = model
        self.params = jax.device_put(cast_params(model, params))
        self.preprocess = dict(preprocess) if preprocess else None
        self.class_names = tuple(class_names)
        self._compiled: dict[tuple, Any] = {}

    @classmethod
    def from_model(
        cls,
        model: ViT,
        params: Mapping[str, Any],
        preprocess: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
    ) -> Predictor:
        """Of a model in either form and its parameters; slims both by itself.

        Args:
          model: from `models.create`.
          params: all of its parameters; of the training form, those that `slim_leaves` names do.
          preprocess: `res`, `mean`, `std`, `interpolation`, `crop_ratio`, for uint8 images and for
            files. Without it only normalised float images are taken.
          class_names: by label.
        """
        params = jax.tree.map(jnp.asarray, dict(params))
        return cls(*models.slim(model, params), preprocess, class_names)

    def __call__(self, images: Any, *, preprocess: bool = False) -> jax.Array:
        """Float32 logits [b, c], of segmentation [b, h, w, c]; arguments as for `predict`."""
        return self._run(images, preprocess, ())[0]

    def predict(self, images: Any, *, preprocess: bool = False) -> tuple[jax.Array, dict[str, Any]]:
        """Logits, and which patches were kept and pruned, or into which tokens they were merged.

        Args:
          images: uint8 [b, height, width, 3], RGB, 0 to 255, of the model's `image_size`; or
            float32 of the same shape, already normalised. With `preprocess` a list of files
            (paths), Pillow images or uint8 arrays [height, width, 3] of any sizes.
          preprocess: resize, crop and normalise first, as in evaluation (of segmentation: in one
            shot).

        Returns:
          Float32 logits [b, c], of segmentation [b, h, w, c], and a dict: `kept` and `pruned`,
          raster indices int32 of each site in descending order of score, -1 for a token that is no
          single patch; `pruned_after` int32 [b, h, w], the block (from 1) after which each patch
          was pruned, 0 where it was kept; `group` int32 [b, h, w], which of the last patch tokens
          holds each patch, of methods that merge. What a method does not have is missing.

        Raises:
          ValueError: if the images have another size or type.
          ConfigError: if they need `preprocess` settings and there are none.
        """
        return self._run(images, preprocess, OUTPUTS)

    def warm_up(self, batch_size: int, dtype: Any = np.uint8) -> tuple[float, float]:
        """Compiles `__call__` for a batch size, unless that was done.

        Returns:
          Seconds of tracing and of compiling; (0, 0) if it was compiled already.
        """
        return self._compile((batch_size, *self.model.image_size, 3), np.dtype(dtype), ())

    def top(self, logits: Any, k: int = 5) -> list[list[tuple[str, float]]]:
        """The k most probable classes of each image as (name, probability), best first."""
        probabilities = np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1))
        best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k]
        return [
            [(self.name(int(label)), float(row[label])) for label in labels]
            for row, labels in zip(probabilities, best, strict=True)
        ]

    def name(self, label: int) -> str:
        """A class's name, its number where names are unknown."""
        return self.class_names[label] if self.class_names else str(label)

    def prepare(self, images: Sequence[Any]) -> np.ndarray:
        """uint8 [b, height, width, 3] of the model's size, from files, Pillow images or arrays.

        Raises:
          ConfigError: without `preprocess` settings, or on a file that cannot be read.
        """
        from cropr_jax.data.preprocess import eval_image

        settings = self.settings()
        return np.stack([np.asarray(eval_image(read(image), settings)) for image in images])

    def normalization(self, dtype: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """(mean, std) for uint8 images, None for floats, which are normalised already.

        Raises:
          ConfigError: for uint8 without `preprocess` settings.
        """
        if dtype != np.uint8:
            return None
        settings = self.settings()
        return np.asarray(settings["mean"], np.float32), np.asarray(settings["std"], np.float32)

    def export(self, path: str | Path, *, format: str = "jax", input: str | None = None) -> None:
        """Writes one file that gives these logits in programs without cropr_jax.

        Args:
          path: of a file that does not exist.
          format: 'jax' for a `jax.export` program (cpu, cuda and tpu), see `cropr_jax.export`; or
            'onnx', in float32 and for methods that draw nothing at random.
          input: 'uint8' for images as `predict` takes them, 'float32' for normalised ones; by
            default the former if `preprocess` is known. Any batch size.

        Raises:
          ConfigError: if that cannot be; nothing is written then.
        """
        from cropr_jax import export

        export.export(self, path, format, input)

    def settings(self) -> dict[str, Any]:
        """`preprocess`.

        Raises:
          ConfigError: if it is not known.
        """
        if self.preprocess is None:
            raise ConfigError(
                "Predictor: uint8 images and files need preprocess settings (res, mean, std, "
                "interpolation, crop_ratio): give them to from_model, or pass normalised floats"
            )
        return self.preprocess

    def _run(self, images: Any, preprocess: bool, outputs: tuple[str, ...]):
        if preprocess:
            images = self.prepare(images)
        if not hasattr(images, "shape"):
            raise ValueError(
                f"images are a {type(images).__name__}: pass an array [b, height, width, 3], or "
                "preprocess=True for files and Pillow images"
            )
        if tuple(images.shape[1:]) != (*self.model.image_size, 3):
            raise ValueError(
                f"images are {list(images.shape)}, expected [b, {self.model.image_size[0]}, "
                f"{self.model.image_size[1]}, 3]; preprocess=True resizes"
            )
        if images.dtype != np.uint8:
            if not jnp.issubdtype(images.dtype, jnp.floating):
                raise ValueError(f"images are {images.dtype}, expected uint8 or float32")
            images = images.astype(np.float32)
        self._compile(tuple(images.shape), images.dtype, outputs)
        return self._compiled[images.shape, images.dtype, outputs](self.params, images)

    def _compile(
        self, shape: tuple[int, ...], dtype: np.dtype, outputs: tuple[str, ...]
    ) -> tuple[float, float]:
        if (shape, dtype, outputs) in self._compiled:
            return 0.0, 0.0
        normalize = self.normalization(dtype)
        function = jax.jit(functools.partial(forward, self.model, normalize, outputs))
        start = time.perf_counter()
        lowered = function.lower(self.params, jax.ShapeDtypeStruct(shape, dtype))
        traced = time.perf_counter()
        self._compiled[shape, dtype, outputs] = lowered.compile()
        return traced - start, time.perf_counter() - traced


def read(image: Any) -> Image.Image:
    """An RGB image from a file, a Pillow image or a uint8 array.

    Raises:
      ConfigError: on a file that cannot be read.
    """
    from PIL import Image

    from cropr_jax.data.preprocess import decode

    if not isinstance(image, str | Path):
        return decode(image)
    try:
        with Image.open(image) as file:
            file.load()
            return decode(file)
    except OSError as error:
        raise ConfigError(f"image '{image}' cannot be read ({error})") from error


def predictor(
    model: ViT,
    params: Mapping[str, Any],
    preprocess: Mapping[str, Any] | None = None,
    class_names: Sequence[str] = (),
) -> Predictor:
    """The predictor that suits the model's head; arguments as for `Predictor.from_model`."""
    from cropr_jax.segment import SegmentationPredictor

    kind = SegmentationPredictor if isinstance(model, Segmenter) else Predictor
    return kind.from_model(model, params, preprocess, class_names)


def forward(
    model: ViT,
    normalize: tuple[Any, Any] | None,
    outputs: tuple[str, ...],
    params: Mapping[str, Any],
    images: jax.Array,
) -> tuple[jax.Array, dict[str, Any]]:
    """Logits of a batch, and those of `outputs` that the model has.

    Methods that draw at random use the same numbers in every call; image i of a batch has its own.

    Args:
      model: slim form.
      normalize: (mean, std) of values scaled to 0 .. 1, or None if the images are normalised.
      outputs: names in the model's `out`.
      params: of the model.
      images: [b, height, width, 3].
    """
    if normalize is not None:
        mean, std = normalize
        images = (images.astype(jnp.float32) / 255 - mean) / std
    keys = rng.example_keys(jax.random.key(0), 0, jnp.arange(images.shape[0]))
    logits, out = model.apply({"params": params}, images, keys=keys)
    return logits, {name: out[name] for name in outputs if name in out}


def load(path: str | Path, dtype: str | None = None) -> Predictor:
    """The predictor of a trained run. Of a checkpoint, only what the slim model needs is read.

    Args:
      path: a work directory (its best checkpoint then, else its last), or the directory of one
        step, `WORKDIR/checkpoints/STEP`. `WORKDIR/config.json` says what the model is and how
        images are preprocessed.
      dtype: compute dtype, 'float32' or 'bfloat16'; by default that of the config.

    Raises:
      CheckpointError: if there is no run or no checkpoint, or it is of another model.
    """
    from cropr_jax.train import checkpoints

    path = Path(path).expanduser().absolute()
    workdir = path.parent.parent if path.parent.name == checkpoints.DIRECTORY else path
    try:
        config = json.loads((workdir / "config.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"'{workdir}' has no config.json: give a work directory of a run, or one of its steps "
            f"such as WORKDIR/{checkpoints.DIRECTORY}/1000"
        ) from error
    model = models.create(config["model"] | ({"dtype": dtype} if dtype else {}))
    params = checkpoints.restore_params(path, slim_leaves(model))
    return predictor(model, params, config["preprocess"], read_class_names(workdir))


def read_class_names(workdir: Path) -> tuple[str, ...]:
    """Names by label that a run wrote to `run.json`; empty if it wrote none."""
    run = workdir / "run.json"
    return tuple(json.loads(run.read_text()).get("class_names", ())) if run.exists() else ()
