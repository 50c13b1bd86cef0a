"""What a trained model pruned and what it saw: a picture and a prediction for any image.

    python -m cropr_jax.explain --workdir runs/digits cat.jpg dog.jpg

Everything shown is the pruned model's own: the classes it predicts are those it finds with the
patches that it kept.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from cropr_jax.errors import ConfigError
from cropr_jax.host import cli
from cropr_jax.runs.load import load


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend.
    """
    parser = cli.parser("cropr_jax.explain", __doc__)
    parser.add_argument("--workdir", required=True, help="of a run, or one of its checkpoints")
    parser.add_argument("--output", default="explain.png", help="the picture")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    args = parser.parse_args(argv)
    output = picture_file(args.output)
    best = load(args.workdir).explain(args.images, output)
    for image, classes in zip(args.images, best, strict=True):
        print(f"{image}: " + ", ".join(f"{name} {share:.1%}" for name, share in classes))
    print(f"written: {output}")


def picture_file(path: str) -> Path:
    """Where a picture goes, if one can be written there.

    Raises:
      ConfigError: if there is no such folder, or pictures have no such suffix.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    found = Path(path).expanduser()
    known = FigureCanvasBase.get_supported_filetypes()
    if found.suffix[1:].lower() not in known:
        raise ConfigError(
            f"--output: found '{path}', expected a name that ends in one of "
            f"{', '.join(f'.{suffix}' for suffix in known)}"
        )
    if not os.access(found.parent, os.W_OK) or not found.parent.is_dir():
        raise ConfigError(f"--output: '{path}': '{found.parent}' is no folder that can be written")
    return found


if __name__ == "__main__":
    cli.run(main)
