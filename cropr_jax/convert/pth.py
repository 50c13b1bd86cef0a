"""PyTorch's `.pth`: a zip archive of a pickle and of the storages that its tensors view.

Source of the layout: pytorch/pytorch: torch/serialization.py.
"""

import math
import re
from typing import Any

import numpy as np

from cropr_jax.convert import pickles
from cropr_jax.convert.archives import Archive, swapped, view
from cropr_jax.convert.messages import shown
from cropr_jax.convert.torch_objects import Tensor
from cropr_jax.errors import ConfigError

# Where checkpoints keep their weights, in the order in which they are looked for: MAE and EVA load
# `model`, then `module` (DeepSpeed); averages and timm's and Lightning's names come after.
WRAPPERS = ("model", "module", "model_ema", "state_dict", "state_dict_ema")


def pickle_root(archive: Archive) -> str | None:
    """The folder of a PyTorch archive's `data.pkl`, with its slash; None if it has none.

    Raises:
      ConfigError: if it has several, or is TorchScript's.
    """
    roots = [
        name.removesuffix("data.pkl")
        for name in archive.names
        if re.fullmatch(r"([^/]+/)?data\.pkl", name)
    ]
    if len(roots) > 1:
        raise ConfigError(f"it holds {len(roots)} files data.pkl; expected one")
    if roots and f"{roots[0]}constants.pkl" in archive.names:
        raise ConfigError(
            "it is a TorchScript program, which is never run; load it with PyTorch and save its "
            "state_dict()"
        )
    return roots[0] if roots else None


def read_pth(archive: Archive, root: str, key: str | None) -> tuple[dict[str, np.ndarray], str]:
    """Arrays of a PyTorch archive by name, and the entry that they were taken from.

    Storages that no chosen tensor needs are not read. Tied tensors are views of one storage.

    Args:
      archive: the archive.
      root: its `pickle_root`.
      key: the entry to take, or None for the first of `WRAPPERS`.

    Raises:
      ConfigError: if pickle, entries or storages are not those of a dict of tensors.
    """
    pickled = archive.content(f"{root}data.pkl")[: pickles.MAX_BYTES + 1].tobytes()
    tensors, wrapper = _unwrap(pickles.loads(pickled), key)
    order = b"little"
    if f"{root}byteorder" in archive.names:
        order = archive.content(f"{root}byteorder")[:80].tobytes()
        if order not in (b"little", b"big"):
            raise ConfigError(f"its entry {root}byteorder is {order!r}; expected little or big")
    # Tied tensors come out once for each name.
    sizes = (math.prod(t.size) * t.storage.dtype.itemsize for t in tensors.values())
    archive.check_size("tensors", sum(sizes))
    storages: dict[str, np.ndarray] = {}
    for storage in dict.fromkeys(tensor.storage for tensor in tensors.values()):
        if storage.key in storages:
            raise ConfigError(f"its storage {shown(storage.key)} is described in two ways")
        content = archive.content(f"{root}data/{storage.key}")
        if len(content) != storage.numel * storage.dtype.itemsize:
            raise ConfigError(
                f"its storage {shown(storage.key)} has {len(content)} bytes; expected "
                f"{storage.numel} numbers of {storage.dtype}"
            )
        storages[storage.key] = swapped(content, storage.dtype) if order == b"big" else content
    arrays = {
        name: view(
            storages[tensor.storage.key],
            tensor.storage.dtype,
            tensor.size,
            tensor.offset,
            tensor.stride,
        )
        for name, tensor in tensors.items()
    }
    return arrays, wrapper


def _unwrap(tree: Any, key: str | None) -> tuple[dict[str, Tensor], str]:
    """The dict of tensors in a checkpoint, and the name of the entry that holds it."""
    if not isinstance(tree, dict):
        raise ConfigError(f"it holds a {type(tree).__name__}; expected a dict of tensors")
    wrapper = key or ""
    if key is not None and not isinstance(tree.get(key), dict):
        raise ConfigError(f"it has no dict under key={key!r}; it holds {_listed(tree)}")
    if key is None and not all(isinstance(value, Tensor) for value in tree.values()):
        wrapper = next((name for name in WRAPPERS if isinstance(tree.get(name), dict)), "")
    chosen = tree[wrapper] if wrapper or key is not None else tree
    for name, value in chosen.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{wrapper and f'under {wrapper!r} '}it holds the {type(value).__name__} "
                f"{shown(str(name))} beside or instead of tensors; choose another entry with key=, "
                f"out of {_listed(tree)}"
            )
    return chosen, wrapper


def _listed(tree: dict[Any, Any]) -> str:
    names = [shown(str(name)) for name in list(tree)[:8]]
    return ", ".join(names) + (f" and {len(tree) - 8} more" if len(tree) > 8 else "")
