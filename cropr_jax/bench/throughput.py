"""Images per second of one model under several reduction methods, side by side.

Machines drift, so the methods take turns: each round times every method once, in an order that
moves on by one from round to round, and the ratio to the unpruned model is the median over rounds
of the ratios within a round. Inputs and parameters lie on the device, programs are compiled and
warm, and every call is waited for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cropr_jax.bench.methods import Settings, create_all, entrants
from cropr_jax.bench.programs import (
    INFERENCE,
    Inference,
    Pool,
    Program,
    Training,
    Weights,
    in_form,
)
from cropr_jax.bench.report import Row
from cropr_jax.bench.spec import training_fields
from cropr_jax.models import Trunk, costs
from cropr_jax.train import assemble

# A method is called in a round until this much time is full, at least once.
ROUND_SECONDS = 0.3
LATENCY_SECONDS = 0.1
# The search for the best batch: a doubling must gain this much; two that do not end it.
GAIN = 1.02
MAX_BATCH = 4096


@dataclasses.dataclass
class Contestant:
    """A stage of a method while it is timed.

    Attributes:
      stage: what is timed.
      facts: what its row says without timing.
      program: at the batch size of the throughput.
      latency: at batch 1; None in training, and where the other is that.
      calls: of the two in a round.
      seconds, latency_seconds: of a call, one entry a round.
    """

    stage: str
    facts: Row
    program: Program
    latency: Program | None
    calls: tuple[int, int] = (1, 1)
    seconds: list[float] = dataclasses.field(default_factory=list)
    latency_seconds: list[float] = dataclasses.field(default_factory=list)

    def warm_up(self) -> None:
        """Runs the programs once, and again to see how many calls fill a round."""
        self.program.seconds()
        calls = math.ceil(ROUND_SECONDS / self.program.seconds())
        more = 1
        if self.latency:
            self.latency.seconds()
            more = math.ceil(LATENCY_SECONDS / self.latency.seconds())
        self.calls = calls, more

    def run(self) -> None:
        """One round."""
        self.seconds.append(self.program.seconds(self.calls[0]))
        if self.latency:
            self.latency_seconds.append(self.latency.seconds(self.calls[1]))


def out_of_memory(error: Exception) -> bool:
    """Whether an error of the runtime says that memory did not suffice."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def best_batch(
    compile_: Callable[[int], Program], say: Callable[[str], None], smallest: int = 1
) -> int:
    """The batch size of the most images per second, by doubling.

    Args:
      compile_: program of a batch size.
      say: takes a line of progress.
      smallest: to begin with.
    """
    best, rate_of_best, idle, size = smallest, 0.0, 0, smallest
    while size <= MAX_BATCH and idle < 2:
        try:
            program = compile_(size)
            program.seconds()
            calls = math.ceil(ROUND_SECONDS / program.seconds())
            rate = size / min(program.seconds(calls) for _ in range(2))
        except jax.errors.JaxRuntimeError as error:
            if size > smallest and out_of_memory(error):
                say(f"batch {size}: does not fit")
                break
            raise
        say(f"batch {size}: {rate:.4g} images/s")
        if rate > GAIN * rate_of_best:
            best, rate_of_best, idle = size, rate, 0
        else:
            idle += 1
        size *= 2
    return best


def prepare(
    model: Trunk,
    stage: str,
    settings: Settings,
    training: Mapping[str, Any],
    weights: Weights,
    pool: Pool,
    say: Callable[[str], None],
) -> Contestant:
    """Compiles a method's programs; `training` is what its step is made of."""
    train = stage == "train"
    maker = Training(model, pool, training) if train else Inference(model, weights, stage)
    batch_size = settings.batch_size or best_batch(maker.compile, say, maker.smallest)
    program = maker.compile(batch_size)
    say(
        f"batch {batch_size}: traced in {program.trace_seconds:.1f} s, compiled in "
        f"{program.compile_seconds:.1f} s"
    )
    latency = None if train or batch_size == 1 else maker.compile(1)
    contestant = Contestant(stage, model_facts(model, stage), program, latency)
    contestant.warm_up()
    return contestant


def measure(
    config: str,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    save: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Times all methods of a group.

    Args:
      config: file or variant, see `cropr_jax.bench.spec`.
      settings: how.
      say: takes lines of progress.
      save: takes the rows after every round, with what was measured until then.

    Returns:
      One row for each method and stage.

    Raises:
      ConfigError: before anything is compiled, if one of the models cannot be.
    """
    training = training_fields(config) if "train" in settings.stages else {}
    return race(config, create_all(config, settings), settings, training, say, save)


def race(
    config: str,
    made: Mapping[str, Trunk],
    settings: Settings,
    training: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: None,
    save: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Times models in turns; ratios are to the one called 'none', if it takes part.

    Those of training steps are to its training step, all others to its forward pass.

    Args:
      config: what the rows say that the models come from.
      made: training forms by the name of their row.
      training: what training steps are made of (`spec.training_fields`).
      settings, say, save: as in `measure`; the models are those of `made`.

    Raises:
      ConfigError: if a training step cannot be cut over the devices, before anything is compiled.
    """
    if "train" in settings.stages and settings.batch_size:
        assemble.check_batch({**training, "batch_size": settings.batch_size})
    weights, pool = Weights(), Pool()
    contestants = {
        entrant: prepare(
            made[entrant[0]],
            entrant[1],
            settings,
            training,
            weights,
            pool,
            lambda line, entrant=entrant: say(f"{' '.join(entrant)}: {line}"),
        )
        for entrant in entrants(made, settings.stages)
    }
    rows: list[Row] = []
    for turn in range(settings.rounds):
        for entrant in rotate(list(contestants), turn):
            contestants[entrant].run()
        rows = [summarize(config, settings, entrant, contestants) for entrant in contestants]
        save(rows)
    return rows


def rotate(names: Sequence[Any], by: int) -> list[Any]:
    """The names in an order that begins `by` places later."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def spread(values: np.ndarray) -> float:
    """Interquartile range."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)


def model_facts(model: Trunk, stage: str) -> Row:
    """`costs.facts` of a model, and whether it fuses its tokens.

    MACs are those of inference in the form of the stage; of training forms, in the slim one.
    """
    facts = costs.facts(model)
    macs = costs.count(in_form(model, stage if stage in INFERENCE else "slim"))
    return {
        "fusion": model.fusion if model.schedule.sites else "none",
        "macs_linear": macs.linear,
        "macs_all": macs.all,
        "params_full": facts["params"],
        "params_slim": facts["params_slim"],
        "tokens": facts["tokens"],
        "tpr": facts["tpr"],
    }


def summarize(
    config: str,
    settings: Settings,
    entrant: tuple[str, str],
    contestants: Mapping[tuple[str, str], Contestant],
) -> Row:
    """A contestant's row of the file; compile_seconds include trace_seconds, spreads are IQRs."""
    contestant = contestants[entrant]
    program, latency = contestant.program, contestant.latency_seconds
    if program.batch_size == 1 and contestant.stage != "train":
        latency = contestant.seconds
    rates = program.batch_size / np.array(contestant.seconds)
    ratios = None
    base = contestants.get(("none", "train" if contestant.stage == "train" else "slim"))
    if base:
        ratios = rates / (base.program.batch_size / np.array(base.seconds))
    return {
        "config": config,
        "reduction": entrant[0],
        "precision": settings.precision,
        "attention": settings.attention,
        "stage": contestant.stage,
        "rounds": len(rates),
        "images_per_second": float(np.median(rates)),
        "spread": spread(rates),
        "ratio": None if ratios is None else float(np.median(ratios)),
        "ratio_spread": None if ratios is None else spread(ratios),
        "batch_size": program.batch_size,
        "latency_seconds": float(np.median(latency)) if latency else None,
        **contestant.facts,
        "flops": None if program.flops is None else program.flops / program.batch_size,
        "trace_seconds": program.trace_seconds,
        "compile_seconds": program.trace_seconds + program.compile_seconds,
        "peak_bytes": program.peak_bytes,
        "seconds": contestant.seconds,
    }
