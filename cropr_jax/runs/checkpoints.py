"""Checkpoints: written in the background, safe against a kill, readable on any device count.

Orbax writes a step into a temporary directory and renames it when all is on disk, so that a step
that is listed is whole. `WORKDIR/checkpoints/STEP` holds the state as nested dictionaries
`{step, params, opt_state, ema}`, of a run with a teacher also its parameters, so that a resumed run
cannot meet another. Its metrics, if it was evaluated, lie beside it (`ranking`). Kept are the last
step and the best evaluated one. Randomness and the input pipeline are functions of (seed, step), so
the step is all that they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import serialization
from orbax.checkpoint import v1 as ocp

from cropr_jax.core.trees import flatten, unflatten
from cropr_jax.errors import CheckpointError
from cropr_jax.runs import ranking

DIRECTORY = "checkpoints"


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes and dtypes of `tree` with a sharding at each leaf: what a restore asks for."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by '/'-joined name; None and empty dictionaries are no leaves."""
    return {k: v for k, v in flatten(tree).items() if v is not None}


def _stored(path: Path) -> dict[str, Any]:
    """Tree of a step's array metadata; reads no array.

    Raises:
      CheckpointError: if `path` is no checkpoint.
    """
    try:
        found = ocp.metadata(str(path)).metadata
    # Whatever a damaged file makes Orbax raise.
    except Exception as error:
        raise CheckpointError(
            f"'{path}' is not a readable checkpoint ({first_line(error)}): give a step directory "
            f"such as WORKDIR/{DIRECTORY}/1000{_others(path)}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"'{path}' is damaged: its list of arrays cannot be read{_others(path)}"
        )
    return found


def _load(path: Path, request: Any) -> Any:
    """What `request` asks for of a step.

    Raises:
      CheckpointError: if its files are damaged.
    """
    try:
        return ocp.load(str(path), request)
    except Exception as error:
        raise CheckpointError(
            f"'{path}' cannot be read ({first_line(error)}): its files are damaged or missing"
            f"{_others(path)}"
        ) from error


def _others(path: Path) -> str:
    """The steps beside a damaged one, from which a run can go on."""
    steps = [p.name for p in path.parent.glob("*") if p.name.isdecimal() and p != path]
    if not steps:
        return ""
    newest = max(steps, key=int)
    return f"; to go on from step {newest}, which is there too, remove this one"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def check_tree(
    wanted: Mapping[str, Any], stored: Mapping[str, Any], path: Path, whole: bool = True
) -> None:
    """Compares names, shapes and dtypes before anything is read.

    Orbax by itself casts dtypes silently, and lists a mismatch over many lines.

    Args:
      wanted: nested tree of the model at hand (leaves with `shape` and `dtype`).
      stored: the same of the file.
      path: for the message.
      whole: whether names that only the file has are an error too.

    Raises:
      CheckpointError: naming the first parameter that differs, in the order of the model.
    """
    ours, theirs = _flat(wanted), _flat(stored)
    for name, leaf in ours.items():
        if name not in theirs:
            raise CheckpointError(
                f"checkpoint '{path}' is of another model: it has no '{name}' "
                f"(expected {_describe(leaf)})"
            )
        if leaf.shape != theirs[name].shape or leaf.dtype != theirs[name].dtype:
            raise CheckpointError(
                f"checkpoint '{path}' is of another model: '{name}' is "
                f"{_describe(theirs[name])} there, expected {_describe(leaf)}"
            )
    extra = [name for name in theirs if name not in ours]
    if whole and extra:
        raise CheckpointError(
            f"checkpoint '{path}' is of another model: it has '{extra[0]}' "
            f"{_describe(theirs[extra[0]])}, which this one has not"
        )


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def restore(path: Path, wanted: Any) -> Any:
    """Reads a whole state onto the devices that `wanted` names, bit-equal to what was saved.

    Args:
      path: step directory.
      wanted: a `TrainState` of `jax.ShapeDtypeStruct`s with shardings (from `abstract`).

    Raises:
      CheckpointError: if the file is of another model, naming the first parameter that differs.
    """
    tree = state_dict(wanted)
    stored = _stored(path)
    # Parameters first: their names say more to the reader than those of the moments.
    check_tree({"params": tree["params"]}, {"params": stored.get("params", {})}, path)
    check_tree(tree, stored, path)
    loaded = {"teacher": None, **_load(path, tree)}
    restored: Any = serialization.from_state_dict(wanted, loaded)
    return restored


def state_dict(state: Any) -> dict[str, Any]:
    """The state as nested dictionaries, of which only runs that have a teacher hold one."""
    tree = serialization.to_state_dict(state)
    return {name: part for name, part in tree.items() if name != "teacher" or part is not None}


def stored_params(path: Path) -> dict[str, Any]:
    """Nested shapes and dtypes of the parameters in a step directory."""
    return _stored(path).get("params", {})


def restore_params(path: Path, wanted: Mapping[str, Any], average: bool = True) -> dict[str, Any]:
    """Reads the named parameters of a step and nothing else.

    Args:
      path: step directory.
      wanted: nested tree of `jax.ShapeDtypeStruct`s, with shardings for another place than the
        first device; may be any part of the parameter tree (for the slim model: without the
        auxiliary branch, whose leaves are then not read).
      average: take the moving average where the run kept one.

    Returns:
      Parameters in the structure of `wanted`.

    Raises:
      CheckpointError: naming the first parameter that is missing or of another shape.
    """
    stored = _stored(path)
    check_tree(wanted, stored.get("params", {}), path, whole=False)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)
        for name, leaf in _flat(wanted).items()
    }
    smoothed = (stored.get("ema") or {}) if average else {}
    request = jax.tree.map(lambda _: ocp.PLACEHOLDER, stored)
    for name, leaf in leaves.items():
        if name in smoothed:
            request["ema"][name] = leaf
        else:
            *parents, last = name.split("/")
            node = request["params"]
            for parent in parents:
                node = node[parent]
            node[last] = leaf
    loaded = _load(path, request)
    params = flatten(loaded["params"])
    found = {n: loaded["ema"][n] if n in smoothed else params[n] for n in leaves}
    return unflatten(found)


def complete(workdir: str | Path) -> dict[int, ranking.Metrics]:
    """Steps of a work directory that are whole, in order, with their metrics, if any.

    Raises:
      CheckpointError: if the file of the metrics is damaged.
    """
    workdir = Path(workdir).absolute()
    if not (workdir / DIRECTORY).is_dir():
        return {}
    with ocp.training.Checkpointer(str(workdir / DIRECTORY)) as reader:
        return with_metrics(reader.checkpoints, ranking.read(workdir))


def with_metrics(
    checkpoints: Iterable[Any], ranked: Mapping[int, ranking.Metrics]
) -> dict[int, ranking.Metrics]:
    """Metrics by step of Orbax's checkpoints; those of the ranking go first."""
    # Earlier versions evaluated before they saved, and gave the metrics to Orbax.
    return {c.step: ranked.get(c.step, c.metrics or {}) for c in checkpoints}


def started(workdir: str | Path) -> bool:
    """Whether the work directory holds a complete checkpoint, from which a run resumes."""
    return bool(complete(workdir))


def find(workdir: str | Path, metric: str | None) -> Path:
    """Directory of the step that is best by a metric; of the last one if none was evaluated.

    Args:
      workdir: of the run.
      metric: of the run, higher is better; None for the last step.

    Raises:
      CheckpointError: if the work directory holds no complete checkpoint.
    """
    root = Path(workdir).absolute() / DIRECTORY
    if steps := complete(workdir):
        best = None if metric is None else ranking.best(steps, metric, steps)
        return root / str(max(steps) if best is None else best)
    raise CheckpointError(
        f"no complete checkpoint under '{root}': train first, or give another --workdir"
    )
