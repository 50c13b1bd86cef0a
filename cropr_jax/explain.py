"""What a trained model pruned and what it saw: a picture and a prediction for any image.

    python -m cropr_jax.explain --workdir runs/digits cat.jpg dog.jpg

Everything shown is the pruned model's own: the classes it predicts are those it finds with the
patches that it kept.
"""

from collections.abc import Sequence

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
    best = load(args.workdir).explain(args.images, args.output)
    for image, classes in zip(args.images, best, strict=True):
        print(f"{image}: " + ", ".join(f"{name} {share:.1%}" for name, share in classes))
    print(f"written: {args.output}")


if __name__ == "__main__":
    cli.run(main)
