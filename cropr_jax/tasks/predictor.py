"""The predictor: the slim form of a model, compiled once for each shape.

A task adds how files are prepared, and what is shown of a prediction: `cropr_jax.load` returns the
predictor of the run's task.

    import cropr_jax
    predictor = cropr_jax.load("runs/digits")
    logits = predictor(images)                                   # [b, c]
    logits = predictor(["cat.jpg", "dog.jpg"], preprocess=True)
    logits, out = predictor.predict(images)                      # with kept and pruned tokens

Letters: b images, c classes, h and w the patch grid.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk

if TYPE_CHECKING:
    from PIL import Image

# What `predict` returns beside the prediction, where the method has it.
OUTPUTS = ("kept", "pruned", "pruned_after", "group")


class Predictor:
    """Predicts with a pruned model; a subclass prepares files for it and shows what it found.

    Attributes:
      model: slim form.
      params: its parameters on the device, cast to the compute dtype once.
      preprocess: `config.preprocess`, or None.
      class_names: by label; empty if unknown.
    """

    def __init__(
        self,
        model: Trunk,
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
        self.params = jax.device_put(models.cast_params(model, params))
        self.preprocess = dict(preprocess) if preprocess else None
        self.class_names = tuple(class_names)
        self._compiled: dict[tuple, Any] = {}

    @classmethod
    def from_model(
        cls,
        model: Trunk,
        params: Mapping[str, Any],
        preprocess: Mapping[str, Any] | None = None,
        class_names: Sequence[str] = (),
    ) -> Predictor:
        """Of a model in either form and its parameters; slims both by itself.

        Args:
          model: from `models.create`.
          params: all of its parameters; of the training form, those that
            `models.slim_leaves` names do.
          preprocess: `res`, `mean`, `std`, `interpolation`, `crop_ratio`, for uint8 images and for
            files. Without it only normalised float images are taken.
          class_names: by label.
        """
        params = jax.tree.map(jnp.asarray, dict(params))
        return cls(*models.slim(model, params), preprocess, class_names)

    def __call__(self, images: Any, *, preprocess: bool = False) -> Any:
        """The prediction alone; arguments as for `predict`."""
        return self._run(images, preprocess, ())[0]

    def predict(self, images: Any, *, preprocess: bool = False) -> tuple[Any, dict[str, Any]]:
        """What the model predicts, and which patches were kept and pruned, or merged into what.

        Args:
          images: uint8 [b, height, width, 3], RGB, 0 to 255, of the model's `image_size`; or
            float32 of the same shape, already normalised. With `preprocess` a list of files
            (paths), Pillow images or uint8 arrays [height, width, 3] of any sizes.
          preprocess: `prepare` them first, as in evaluation (of segmentation: in one shot).

        Returns:
          The prediction (of classification float32 logits [b, c], of segmentation [b, h, w, c]),
          and a dict: `kept` and `pruned`, raster indices int32 of each site in descending order of
          score, -1 for a token that is no single patch; `pruned_after` int32 [b, h, w], the block
          (from 1) after which each patch was pruned, 0 where it was kept; `group` int32 [b, h, w],
          which of the last patch tokens holds each patch, of methods that merge. What a method does
          not have is missing.

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

    def name(self, label: int) -> str:
        """A class's name, its number where names are unknown."""
        return self.class_names[label] if self.class_names else str(label)

    def prepare(self, images: Sequence[Any]) -> np.ndarray:
        """Images of the model's size, [b, height, width, 3], from files, Pillow images or arrays.

        uint8, or float32 if they are normalised already.

        Raises:
          ConfigError: without `preprocess` settings, or on a file that cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} prepares no files")

    @classmethod
    def picture(cls, model: Trunk) -> str:
        """Name of the picture that a run of such a model ends with; '' where there is none."""
        return ""

    def explain(
        self, images: Sequence[Any], path: str | Path, truths: Sequence[Any] | None = None
    ) -> list[list[tuple[str, float]]]:
        """Writes the picture of what was pruned of some images, and what was seen in them.

        Args:
          images: files, Pillow images or uint8 arrays, of any sizes.
          path: of the picture, `.png`, `.pdf` or `.svg`.
          truths: labels of the images, if they are known, as their source has them; shown beside
            the prediction.

        Returns:
          For each image (name, share) of five classes at most, greatest first.

        Raises:
          ConfigError: if an image cannot be read, or there is nothing to show.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no picture")

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
        """Writes one file that gives these predictions in programs without cropr_jax.

        Args:
          path: of a file that does not exist.
          format: 'jax' for a `jax.export` program (cpu, cuda and tpu), see `cropr_jax.export`; or
            'onnx', in float32 and for methods that draw nothing at random.
          input: 'uint8' for images as `predict` takes them, 'float32' for normalised ones; by
            default the former if `preprocess` is known. Any batch size.

        Raises:
          ConfigError: if that cannot be; nothing is written then.
        """
        from cropr_jax.models import export

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
        if isinstance(images, str | Path):
            raise ValueError(
                f"images are one path, {str(images)!r}: pass a list of them, as in "
                f"predictor([{str(images)!r}], preprocess=True)"
            )
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
        function = jax.jit(functools.partial(models.forward, self.model, normalize, outputs))
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
            decoded = decode(file)
            decoded.load()  # what is RGB already is not read before the file is closed
            return decoded
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"image '{image}' cannot be read ({error})") from error
