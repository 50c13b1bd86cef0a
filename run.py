"""Trains or evaluates a config: `python run.py --config configs/digits.py`.

The part after a colon picks a variant: `--config configs/in1k.py:vit_l,res=336`; any field can be
set beside it, `--config.total_steps=100`. The same command resumes an interrupted run.
"""

import os
import re
import sys
from typing import NoReturn

from absl import app, flags
from ml_collections import config_flags

FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file("config", None, "FILE or FILE:VARIANT,KEY=VALUE,...")
flags.DEFINE_string("workdir", "", "Where to write; default runs/CONFIG-VARIANT.")
flags.DEFINE_enum("mode", "train", ["train", "eval"], "What to do.")
flags.DEFINE_bool("print_config", False, "Print the resolved config as JSON and stop.")
flags.DEFINE_bool("print_fields", False, "Print what each field means and may hold, and stop.")
flags.DEFINE_string(
    "cache_dir", "~/.cache/cropr_jax/xla", "Where compiled programs are kept; empty for nowhere."
)
flags.mark_flag_as_required("config")


def default_workdir(config_flag: str) -> str:
    """`configs/in1k.py:vit_l,res=336` -> `runs/in1k-vit_l-res=336`."""
    path, _, variant = config_flag.partition(":")
    name = os.path.splitext(os.path.basename(path))[0]
    return os.path.join("runs", re.sub(r"[^\w.=+-]+", "-", f"{name}-{variant}").strip("-"))


def fail(message: str) -> NoReturn:
    """Ends with one line on what the user has to mend."""
    from cropr_jax.host.messages import printable

    print("error: " + " ".join(printable(message).split()), file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str]) -> list[str]:
    """Parses flags; a mistake in them ends in one line."""
    from cropr_jax.errors import ConfigError
    from cropr_jax.host import config_file

    given = [i for i, word in enumerate(argv) if re.fullmatch(r"--?config(=.*)?", word)]
    try:
        if given:
            here = given[-1]
            value = argv[here].partition("=")[2] or "".join(argv[here + 1 : here + 2])
            config_file.check_fields(config_file.load(value), argv)
        return FLAGS(argv)
    except (flags.Error, ConfigError) as error:
        fail(config_file.reason(error))


def main(argv: list[str]) -> None:
    from cropr_jax.errors import ConfigError

    try:
        if len(argv) > 1:
            raise ConfigError(f"unknown argument '{argv[1]}': options start with --")
        from cropr_jax import train
        from cropr_jax.train import processes

        processes.set_up(FLAGS.cache_dir, FLAGS.config.get("cpu_devices"))
        workdir = FLAGS.workdir or default_workdir(FLAGS["config"].config_filename)
        if FLAGS.print_config:
            print(FLAGS.config.to_json_best_effort(indent=2))
            return
        if FLAGS.print_fields:
            from cropr_jax.train import fields

            print(fields.describe(fields.settled(fields.plain(FLAGS.config))))
            return
        {"train": train.train, "eval": train.evaluate}[FLAGS.mode](FLAGS.config, workdir)
    except (ConfigError, FloatingPointError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect of a command that Ctrl-C ended


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
