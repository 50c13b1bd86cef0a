"""Converts weights once and for all, or shows what a conversion would do.

    python -m cropr_jax.convert eva02_L_pt_m38m_p14.pt eva02_l.safetensors
    python -m cropr_jax.convert mae_pretrain_vit_large.pth --dry_run
    python -m cropr_jax.convert runs/in1k backbone.safetensors --to timm
    python -m cropr_jax.convert weights.npz vit_l.safetensors --config configs/in1k.py:vit_l,res=448

Without a config all that is known of the file is kept, whatever it is; with one it is fitted to the
config's model as `config.init` fits it. `--to safetensors` (the default) and `orbax` keep our
names, and both are taken by `config.init`; `timm` writes the backbone for PyTorch.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cropr_jax import models
from cropr_jax.convert import architecture, files, load, match, resample, to_timm
from cropr_jax.convert.messages import shown
from cropr_jax.convert.sources import Source
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.host import cli
from cropr_jax.host.version import __version__

FORMATS = ("safetensors", "orbax", "timm")


@dataclasses.dataclass(frozen=True)
class Target:
    """What is to come out.

    Attributes:
      shapes: by our name.
      grid: (h, w) of the position table.
      fresh: `Trunk.fresh`.
    """

    shapes: dict[str, tuple[int, ...]]
    grid: tuple[int, int]
    fresh: tuple[str, ...] = models.Trunk.fresh


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = cli.parser("cropr_jax.convert", __doc__)
    add = made.add_argument
    add("src", help="file of weights, its address, or a work or step directory of a run")
    add("dst", nargs="?", help="what to write; must not exist")
    add("--to", choices=FORMATS, default=FORMATS[0], help="format of DST (%(default)s)")
    add("--config", metavar="FILE[:ARGS]", help="fit to this config's model")
    add("--image_size", type=architecture.size, metavar="H[xW]", help="fit to images of this size")
    add("--patch", type=architecture.size, metavar="P", help="fit to patches of this size")
    add(
        "--grid",
        type=architecture.size,
        metavar="H[xW]",
        help="patches of the images that SRC was trained on, if they were not square",
    )
    add("--heads", type=int, help="attention heads, if the width does not imply them")
    add(
        "--resampling",
        choices=tuple(resample.METHODS),
        default="timm",
        help="rule for positions and patch kernels (%(default)s)",
    )
    add("--dry_run", action="store_true", help="print what goes where, and write nothing")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend; nothing is written then.
    """
    args = parser().parse_args(argv)
    if not args.dry_run:
        check_destination(args.dst)
    if args.config and (args.image_size or args.patch or args.heads):
        raise ConfigError("--config: it says what the model is; leave out the other options")
    model = config_model(args.config) if args.config else None
    source, reader = load.open_source(args.src, model.heads if model else args.heads, args.grid)
    try:
        target = of_model(model) if model else of_source(source, args.image_size, args.patch)
        plan = match.match(source, target.shapes, target.grid, target.fresh)
        if args.dry_run:
            print(table(source, plan, target))
            return
        params = {
            name: match.fit(name, array, target.shapes[name], source, target.grid, args.resampling)
            for name, array in reader(plan.taken)
        }
    except ConfigError as error:
        raise ConfigError(f"'{args.src}': {error}") from error
    write(args.dst, args.to, params, target.grid)
    notes = load.Loaded(params, source.kind, plan).notes()
    if args.to == "timm" and any(map(to_timm.is_reducer, params)):
        notes.append("left: reducers (unknown to timm)")
    print("; ".join([f"{len(params)} parameters of kind {source.kind!r} to '{args.dst}'", *notes]))


def check_destination(dst: str | None) -> None:
    """Refuses a destination that is not given, exists, or lies nowhere.

    Raises:
      ConfigError: saying which.
    """
    if not dst:
        raise ConfigError("DST: nothing given; name a file to write, or ask for --dry_run")
    path = Path(dst).expanduser()
    if path.exists():
        raise ConfigError(f"DST: '{dst}' exists; remove it or name another")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"DST: there is no folder '{path.parent}'")


def config_model(value: str) -> models.Trunk:
    """The model of a config file, in its training form."""
    from cropr_jax.host import config_file

    config = config_file.load(value)
    return models.create(config.model.to_dict())


def of_model(model: models.Trunk) -> Target:
    """What a model needs."""
    flat = trees.flatten(models.abstract_params(model))
    return Target({name: leaf.shape for name, leaf in flat.items()}, model.grid, model.fresh)


def of_source(
    source: Source, image_size: tuple[int, int] | None, patch: tuple[int, int] | None
) -> Target:
    """What the file holds, for another image size or patch where one is given.

    Raises:
      ConfigError: if it lacks what tells its size, or the image is no multiple of the patch.
    """
    fields = architecture.model_fields(source)
    height, width = image_size or fields["image_size"]
    kernel = patch or fields["patch"]
    if height % kernel[0] or width % kernel[1]:
        raise ConfigError(f"--image_size: {height}x{width} is not a multiple of the patch {kernel}")
    grid = height // kernel[0], width // kernel[1]
    shapes = {name: tuple(leaf.array.shape) for name, leaf in source.leaves.items()}
    shapes["pos_embed"] = (1, source.prefix + grid[0] * grid[1], fields["width"])
    shapes["patch_embed/kernel"] = (*kernel, *shapes["patch_embed/kernel"][2:])
    return Target(shapes, grid)


def table(source: Source, plan: match.Plan, target: Target) -> str:
    """Which name of the file becomes which of ours, with shapes, in columns."""
    rows = [("in the file", "shape", "here", "shape", "")]
    for name in plan.taken:
        leaf = source.leaves[name]
        rows.append(
            (
                leaf.source,
                _shape(leaf.shape),
                name,
                _shape(target.shapes[name]),
                plan.resized.get(name, ""),
            )
        )
    rows += [("-", "", name, _shape(target.shapes[name]), why) for name, why in plan.fresh.items()]
    rows += [(shown(name), "", "-", "", why) for name, why in plan.dropped.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([f"Kind: {source.kind}", *lines])


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def write(dst: str, to: str, params: Mapping[str, np.ndarray], grid: tuple[int, int]) -> None:
    """Writes parameters by our names in a format of `FORMATS`, the whole or nothing."""
    path = Path(dst).expanduser().absolute()
    if to == "timm":
        files.write_safetensors(path, to_timm.rename(params), {"format": "pt"})
    elif to == "safetensors":
        metadata = {"format": "cropr_jax", "version": __version__, "grid": f"{grid[0]}x{grid[1]}"}
        files.write_safetensors(path, params, metadata)
    else:
        _write_orbax(path, trees.unflatten(params))


def _write_orbax(path: Path, params: dict[str, Any]) -> None:
    try:
        from orbax.checkpoint import v1 as ocp
    except ImportError as error:
        raise ConfigError("--to orbax: needs pip install 'cropr_jax[train]'") from error
    ocp.save(str(path), {"params": params})


if __name__ == "__main__":
    cli.run(main)
