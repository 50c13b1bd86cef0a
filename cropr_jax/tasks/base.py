"""What a task is: everything that differs from task to task, in one object.

Model, input pipeline, step, loop, predictor, benchmark, comparison and pictures ask the task and
know none by name. A further task is a subclass of `Task` and a call of `cropr_jax.tasks.register`
(docs/adding_a_task.md).

Letters: b examples, n queries of an auxiliary head, c its outputs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cropr_jax.data.records import Example, Examples, Record, Source
from cropr_jax.errors import ConfigError
from cropr_jax.host.schema import SECTION, SHARE, SIZE, Field, Section, number, several
from cropr_jax.models import Trunk
from cropr_jax.tasks.predictor import Predictor

# What tasks on images have in `config.preprocess`.
PREPROCESS: dict[str, Field] = {
    "res": Field(SIZE, "height and width that the model sees, in pixels"),
    "mean": Field(several(SHARE, 3), "mean of the channels of values from 0 to 1"),
    "std": Field(several(number(0, 1, above=True), 3), "standard deviation of the channels"),
    "train": Field(SECTION, "what changes images in training"),
}
Batch = Mapping[str, Any]
Inputs = dict[str, Any]
Losses = dict[str, jax.Array]


class Metric(NamedTuple):
    """The metric that ranks checkpoints and methods: a fraction, higher is better.

    Attributes:
      name: in the results of an evaluator.
      label: in tables and pictures.
    """

    name: str
    label: str


class Result(NamedTuple):
    """What an evaluator found.

    Attributes:
      metrics: by name, with `examples`, how many were counted.
      per_class: of each class by name; empty for tasks without.
    """

    metrics: dict[str, float]
    per_class: dict[str, dict[str, float | None]] = {}


@runtime_checkable
class Evaluator(Protocol):
    """Collects, on the host, what the batches of one split gave.

    It gets no batch: of several hosts each has its own rows of that, outputs are those of all.
    """

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Takes up one batch.

        Args:
          outputs: of `Task.measure`, as NumPy arrays, and of all rows `id` int32 [b], by which the
            source has the truth, and `mask` float32 [b], 0 for rows that only fill the batch.
        """
        ...

    def result(self) -> Result:
        """Metrics over all batches.

        Raises:
          ValueError: if nothing was counted.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """A task, as a config sets it up.

    Class attributes:
      name: that configs give as `config.task`, and as `config.model.head`.
      metric: that ranks checkpoints.
      fractions: names of metrics that are shown as per cent.
      main_loss: of the head, in words.
      head: class of the models.
      predictor: class of the predictors.
      labels: kind of the labels that it learns from (`cropr_jax.data.records`).
      made_up: the source of made-up data, for dry runs (`config.data.source`).
      fields: that sections of the config have for this task, beside those of all tasks.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]
    fractions: ClassVar[frozenset[str]]
    main_loss: ClassVar[str]
    head: ClassVar[type[Trunk]]
    predictor: ClassVar[type[Predictor]]
    labels: ClassVar[str]
    made_up: ClassVar[str]
    fields: ClassVar[Mapping[str, Section]] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Task":
        """The task of a config (plain values), which may lack sections that only training reads.

        Raises:
          ConfigError: on a wrong field.
        """
        return cls()

    def check(self, config: Mapping[str, Any], model: Trunk, source: Source) -> None:
        """Refuses a config whose fields do not suit the task, before anything is compiled.

        Args:
          config: plain values.
          model: training form.
          source: of the training examples.

        Raises:
          ConfigError: naming the field.
        """
        if source.num_classes > model.num_classes:
            raise ConfigError(
                f"config.model.num_classes: {model.num_classes}, but the data set has "
                f"{source.num_classes} classes"
            )

    # On the host, in the workers of the input pipeline: what these return is pickled.

    def check_source(self, source: Source) -> None:
        """Refuses a source whose labels are of another kind.

        Raises:
          ConfigError: naming both fields.
        """
        if source.reader.kind != self.labels:
            raise ConfigError(
                f"config.data: its labels are {source.reader.kind}, but config.task is "
                f"{self.name!r}, which needs {self.labels}. Set config.task, or config.data.source "
                "and what goes with it."
            )

    def train_transform(
        self, preprocess: Mapping[str, Any]
    ) -> Callable[[Record, np.random.Generator], Example]:
        """(record, rng) -> example, a dict of arrays whose shapes are those of all examples.

        Args:
          preprocess: `config.preprocess`.

        Raises:
          ConfigError: a field that cannot be read; no image is.
        """
        raise NotImplementedError

    def eval_transform(
        self, preprocess: Mapping[str, Any], source: Source
    ) -> Callable[[Record], Example]:
        """Record -> example of evaluation, without chance; see `train_transform`."""
        raise NotImplementedError

    def filler(
        self, preprocess: Mapping[str, Any], source: Source, *, train: bool = False
    ) -> Example:
        """An example that nothing counts, of the shapes and types of all examples.

        Fills the last batch of an evaluation, and tells how large examples are.

        Args:
          preprocess: `config.preprocess`.
          source: of the examples.
          train: whether of training rather than of evaluation.
        """
        raise NotImplementedError

    def training(self, preprocess: Mapping[str, Any], source: Source) -> Examples:
        """Training examples of a source; `preprocess` is that of the config."""
        self.check_source(source)
        transform = self.train_transform(preprocess)
        return Examples(source, transform, self.filler(preprocess, source, train=True))

    def evaluation(self, preprocess: Mapping[str, Any], source: Source) -> Examples:
        """Evaluation examples of a source; `preprocess` is that of the config."""
        self.check_source(source)
        transform = self.eval_transform(preprocess, source)
        return Examples(source, transform, self.filler(preprocess, source))

    # On the device, pure and traceable.

    def prepare(self, batch: Batch, model: Trunk, key: jax.Array) -> tuple[Inputs, Any]:
        """What the model sees of a training batch, and what the losses compare with.

        Args:
          batch: of examples of `train_transform`, the global one.
          model: training form.
          key: of the step, for what is drawn here.

        Returns:
          Inputs of the model by name (`Trunk.__call__`), and targets, a tree of arrays. The first
          axis of all of them is that of the examples, by which micro-batches are cut.
        """
        raise NotImplementedError

    def predicted_targets(self, prediction: Any, model: Trunk) -> Any:
        """Targets that stand for the labels: what a model predicts (`config.targets=model`)."""
        raise NotImplementedError(f"task {self.name!r} makes no targets of predictions")

    def criterion(
        self, logits: Float[Array, "b n c"], places: Int[Array, "b n"] | None, targets: Any
    ) -> Float[Array, ""]:
        """Loss of one auxiliary head (`cropr_jax.core.reducer.Criterion`).

        Args:
          logits: of every query.
          places: patch that each query predicts, where queries stand for patches.
          targets: from `prepare`.
        """
        raise NotImplementedError

    def losses(
        self, prediction: Any, extra: Mapping[str, Float[Array, ""]], targets: Any
    ) -> tuple[Float[Array, ""], Losses]:
        """The loss that is minimised, and its parts for the log.

        Args:
          prediction: of the model in training.
          extra: losses of the reducers, which are added with weight 1 (`total`).
          targets: from `prepare`.
        """
        raise NotImplementedError

    def measure(self, apply: Callable[[Inputs], Any], batch: Batch) -> dict[str, jax.Array]:
        """What the evaluator needs of a batch: sums, or arrays of a fixed size for each example.

        Args:
          apply: inputs of the model -> its prediction.
          batch: of examples of `eval_transform`, with `mask`.
        """
        raise NotImplementedError

    # On the host.

    def evaluator(self, source: Source) -> Evaluator:
        """Collects the measures of one split.

        Args:
          source: of its examples; it has their truth and the names of the classes.
        """
        raise NotImplementedError

    def example_batch(self, model: Trunk, size: int) -> dict[str, np.ndarray]:
        """A made-up training batch of so many examples, for the benchmark."""
        raise NotImplementedError

    def card(self, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        """Rows of the recipe card that only this task has."""
        return ()

    def words(self, metrics: Mapping[str, float | int | None]) -> str:
        """Metrics in words: fractions as per cent."""
        return ", ".join(f"{name} {self.show(name, value)}" for name, value in metrics.items())

    def show(self, name: str, value: float | int | None) -> str:
        """The value of a metric in words."""
        if value is None:
            return "-"
        return f"{value:.2%}" if name in self.fractions else f"{value:.6g}"


def total(
    main: Float[Array, ""], extra: Mapping[str, Float[Array, ""]]
) -> tuple[Float[Array, ""], Losses]:
    """The plain sum of all losses, and its parts.

    Args:
      main: of the head.
      extra: of the reducers.

    Returns:
      The sum, and the parts: `main_loss`, and `auxiliary_loss`, the mean of the others.
    """
    metrics = {"main_loss": main}
    if not extra:
        return main, metrics
    added = jnp.stack(list(extra.values())).sum()
    metrics["auxiliary_loss"] = added / len(extra)
    return main + added, metrics
