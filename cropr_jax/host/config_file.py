"""Config files as the command line names them: `FILE:VARIANT,KEY=VALUE` and `--config.field=value`.

The flags library answers an unknown field or an error inside of the file with a traceback; here
each is one line.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import did_you_mean


def load(value: str, overrides: Sequence[str] = ()) -> Any:
    """The config of a file.

    Args:
      value: `FILE` or `FILE:VARIANT,KEY=VALUE,...`.
      overrides: words such as `--config.total_steps=100`.

    Raises:
      ConfigError: if there is no such file or field, or the file refuses its arguments.
    """
    path = value.partition(":")[0]
    if not os.path.isfile(path):
        raise ConfigError(f"--config: there is no file '{path}'")
    # Config files import their neighbours as `configs.NAME`.
    root = os.path.dirname(os.path.dirname(os.path.realpath(path)))
    if root not in sys.path:
        sys.path.append(root)
    # Alone first: the library can only set a field that exists.
    config = _parse([f"--config={value}"])
    check_fields(config, overrides)
    return _parse([f"--config={value}", *overrides]) if overrides else config


def check_fields(config: Any, words: Iterable[str]) -> None:
    """Refuses words `--config.x.y=z` whose field does not exist; others are passed over.

    Raises:
      ConfigError: naming the fields that come close.
    """
    for word in words:
        if match := re.match(r"--?(?:no)?config\.([\w.\[\]]+)", word):
            _check_field(config, match[1])


def reason(error: BaseException) -> str:
    """What went wrong at the root of an error of the flags library.

    It raises a config file's own errors again, with a traceback in the text.
    """
    found, cause = error, error
    while cause is not None:
        found = cause if isinstance(cause, ConfigError) else found
        cause = cause.__cause__ or cause.__context__
    lines = str(found).strip().splitlines() or [type(found).__name__]
    return lines[0] if isinstance(found, ConfigError) else lines[-1]


def _parse(words: Sequence[str]) -> Any:
    values, argv = flags.FlagValues(), ["config_file", *words]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        values(argv)
        return values["config"].value
    except (flags.Error, ImportError, SyntaxError) as error:
        raise ConfigError(reason(error)) from error


def _keys(node: Any) -> Iterator[str]:
    return (str(key) for key in node) if hasattr(node, "keys") else iter(())


def _check_field(config: Any, name: str) -> None:
    node = config
    for part in re.sub(r"\[.*?\]", "", name).split("."):
        known = list(_keys(node))
        if part not in known:
            raise ConfigError(f"config.{name}: no such field; {did_you_mean(part, known)}")
        node = node[part]
