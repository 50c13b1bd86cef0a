"""What a comparison consists of: entries of its table, and the runs of each."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cropr_jax.bench.spec import split_options
from cropr_jax.data.open import Splits
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.host import config_file
from cropr_jax.reducers.registry import OF_FUSIONS
from cropr_jax.train import fields, recipe
from cropr_jax.train.recipe import Recipe

# Fields that change no number of a finished run: what it was evaluated on, and how, does.
FREE = tuple(name for name in fields.FREE if name not in ("data.eval", "preprocess.eval_stride"))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table: one method at one schedule, pruning rate and fusion.

    Attributes:
      reduction: as configs name it, with the options that it differs in, if any:
        'cropr:heads=3:projections=True'.
      schedule: as configs name it; empty for the unpruned model, which has none.
      rate: R; negative for the config's own.
      fusion: as configs name it; empty for the config's own.
    """

    reduction: str
    schedule: str = ""
    rate: int = -1
    fusion: str = ""

    @property
    def label(self) -> str:
        """'cropr-per_block-r8', also the name of its directory."""
        rate = f"r{self.rate}" if self.rate >= 0 else ""
        words = [self.reduction.replace(":", "-"), self.schedule, rate, self.fusion]
        return "-".join(word for word in dict.fromkeys(words) if word)

    @property
    def overrides(self) -> list[str]:
        """Its options as `--config.field=value`."""
        _, options = split_options(self.reduction)
        return [f"--config.model.reduction.options.{name}={text}" for name, text in options.items()]

    def config(self, config: str, seed: int) -> str:
        """The `--config` value of one of its runs."""
        name, _ = split_options(self.reduction)
        words = [f"seed={seed}"]
        words += [f"fusion={self.fusion}"] if self.fusion else []
        # A fusion with a method of its own brings it along.
        words += [] if name in OF_FUSIONS else [f"reduction={name}"]
        words += [f"schedule={self.schedule}"] if self.schedule else []
        words += [f"r={self.rate}"] if self.rate >= 0 else []
        return config + ("," if ":" in config else ":") + ",".join(words)


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of an entry.

    Attributes:
      config: as the file and the overrides say it.
      recipe: what follows from it.
      workdir: of this run alone.
    """

    entry: Entry
    seed: int
    config: Any
    recipe: Recipe
    workdir: Path

    def result(self) -> dict[str, Any] | None:
        """Its `result.json`, or None while there is none.

        Raises:
          ConfigError: if the file is of another config, whose numbers must not enter the table.
        """
        path = self.workdir / "result.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        now, before = self.recipe.config, found["config"]
        if name := fields.difference(now, before, FREE):
            raise ConfigError(
                f"--workdir: '{path}' was run with config.{name} "
                f"{fields.leaves(before).get(name)!r}, now it is {fields.leaves(now).get(name)!r}; "
                "give another --workdir or remove that run"
            )
        return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs, and why some entries have none.

    Attributes:
      runs: by entry, in the order of the table.
      unreachable: schedules that a method cannot meet, with the reason.
    """

    runs: dict[Entry, list[Run]]
    unreachable: dict[Entry, str]


def entries(
    reductions: Sequence[str],
    schedules: Sequence[str],
    rates: Sequence[int],
    fusions: Sequence[str] = ("",),
) -> list[Entry]:
    """Rows in the order of the table; the unpruned model comes once, first."""
    found = [Entry("none")] if "none" in reductions else []
    for schedule, rate, fusion in itertools.product(schedules, rates, fusions):
        names = [name for name in reductions if name != "none"]
        names = [fusion] if fusion in OF_FUSIONS else names
        found += [Entry(name, schedule, rate, fusion) for name in names]
    return list(dict.fromkeys(found))


def make(
    config: str,
    overrides: Sequence[str],
    rows: Mapping[Entry, Sequence[int]],
    workdir: Path,
) -> Plan:
    """Resolves every run before the first is trained.

    Args:
      config: `FILE` or `FILE:VARIANT,KEY=VALUE,...`; the file takes `reduction`, `schedule`, `r`
        and `seed`.
      overrides: `--config.field=value` of all runs.
      rows: the seeds of each entry.
      workdir: of the comparison.

    Raises:
      ConfigError: on a wrong config, whichever run it is of.
    """
    runs: dict[Entry, list[Run]] = {}
    unreachable, opened = {}, {}
    for entry, seeds in rows.items():
        try:
            runs[entry] = []
            for seed in seeds:
                loaded = config_file.load(
                    entry.config(config, seed), [*overrides, *entry.overrides]
                )
                place = workdir / entry.label / f"seed_{seed}"
                data = fields.plain(loaded.data)
                splits = opened.setdefault(json.dumps(data), Splits(data))
                runs[entry].append(Run(entry, seed, loaded, recipe.resolve(loaded, splits), place))
        except ScheduleError as error:
            del runs[entry]
            unreachable[entry] = str(error)
    return Plan(runs, unreachable)
