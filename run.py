"""Trains or evaluates a config: `python run.py --config configs/digits.py`.

The part after a colon picks a variant: `--config configs/in1k.py:vit_l,res=336`; any field can be
set beside it, `--config.total_steps=100`. The same command resumes an interrupted run.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file("config", None, "FILE or FILE:VARIANT,KEY=VALUE,...")
flags.DEFINE_string("workdir", "", "Where to write; default runs/CONFIG-VARIANT.")
flags.DEFINE_enum("mode", "train", ["train", "eval"], "What to do.")
flags.DEFINE_bool("print_config", False, "Print the resolved config as JSON and stop.")
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
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def reason(error: BaseException) -> str:
    """What went wrong at the root of an error of the flags library.

    It raises a config file's own errors again, with a traceback in the text.
    """
    from cropr_jax.errors import ConfigError

    found, cause = error, error
    while cause is not None:
        found = cause if isinstance(cause, ConfigError) else found
        cause = cause.__cause__ or cause.__context__
    lines = str(found).strip().splitlines() or [type(found).__name__]
    return lines[0] if isinstance(found, ConfigError) else lines[-1]


def overridden(argv: list[str]) -> Iterator[str]:
    """Names of the config fields that are set beside the file: `optimizer.lr`."""
    for word in argv:
        if match := re.match(r"--?(?:no)?config\.([\w.\[\]]+)", word):
            yield match[1]


def check_overrides(config: Any, names: Iterator[str]) -> None:
    """Ends with the names that come close, if a field does not exist."""
    for name in names:
        node: Any = config
        for part in re.sub(r"\[.*?\]", "", name).split("."):
            known = [str(key) for key in node] if hasattr(node, "keys") else []
            if part not in known:
                close = difflib.get_close_matches(part, known, 3, 0.5)
                hint = (
                    f"did you mean {' or '.join(close)}?"
                    if close
                    else (f"there are {', '.join(sorted(known)) or 'none below it'}")
                )
                fail(f"config.{name}: no such field; {hint}")
            node = node[part]


def parse(argv: list[str]) -> list[str]:
    """Parses flags; a mistake in them ends in one line.

    The file is loaded once by itself first: the flags library answers an unknown field or an error
    inside of the file with a traceback.
    """
    given = [i for i, word in enumerate(argv) if re.fullmatch(r"--?config(=.*)?", word)]
    if given:
        alone = flags.FlagValues()
        config_flags.DEFINE_config_file("config", flag_values=alone, sys_argv=argv[:1])
        value = argv[given[-1]].partition("=")[2] or "".join(argv[given[-1] + 1 : given[-1] + 2])
        if not os.path.isfile(value.partition(":")[0]):
            fail(f"--config: there is no file '{value.partition(':')[0]}'")
        try:
            alone([argv[0], f"--config={value}"])
            check_overrides(alone["config"].value, overridden(argv))
        except (flags.Error, ImportError, SyntaxError) as error:
            fail(reason(error))
    try:
        return FLAGS(argv)
    except flags.Error as error:
        fail(reason(error))


def set_up(cache_dir: str) -> None:
    """What must be set before the first array: where compiled programs are kept."""
    import jax

    # Orbax reports each save in a dozen lines, JAX every backend that it did not find.
    logging.set_verbosity(logging.WARNING)
    if cache_dir and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache_dir))
        # Small programs too: of a model in hundreds of them, most compile in less than a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def main(argv: list[str]) -> None:
    from cropr_jax.errors import ConfigError

    try:
        if len(argv) > 1:
            raise ConfigError(f"unknown argument '{argv[1]}': options start with --")
        set_up(FLAGS.cache_dir)
        from cropr_jax import train

        workdir = FLAGS.workdir or default_workdir(FLAGS["config"].config_filename)
        if FLAGS.print_config:
            print(FLAGS.config.to_json_best_effort(indent=2))
            return
        {"train": train.train, "eval": train.evaluate}[FLAGS.mode](FLAGS.config, workdir)
    except (ConfigError, FloatingPointError) as error:
        fail(str(error))


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
