"""Prints `docs/methods.md`: every method with its options, as their classes say it.

python docs/make_methods.py > docs/methods.md
"""

import inspect
import re

from cropr_jax.reducers.registry import OF_FUSIONS, REDUCERS, meanings, method, options

HEAD = """# Methods and their options

Made by `python docs/make_methods.py > docs/methods.md` from the classes. A config shows all options
of its method; `--config.model.reduction.options.NAME=VALUE` sets one, and
`--reductions METHOD:NAME=VALUE` compares them.
"""


def first_sentence(text: str) -> str:
    """Of a docstring, in one line."""
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    return re.match(r".*?[.](?= |$)|.*", paragraph)[0]


def page() -> str:
    """The page."""
    parts = [HEAD]
    for name in [*REDUCERS, *OF_FUSIONS]:
        said = meanings(name)
        parts.append(f"\n## `{name}`\n\n{first_sentence(method(name).__doc__ or '')}\n")
        rows = [
            f"| `{option}` | `{default!r}` | {said[option]} |"
            for option, default in options(name).items()
        ]
        if rows:
            parts.append(
                "\n".join(["", "| option | default | meaning |", "| --- | --- | --- |", *rows, ""])
            )
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
