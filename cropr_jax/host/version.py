"""The version of this package, and those of all that decides numbers."""

import contextlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

__version__ = "0.1.0"

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "einops", "numpy")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, of cropr_jax and of those packages that are installed."""
    found = {"python": platform.python_version(), "cropr_jax": __version__}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def revision() -> str:
    """Git revision of the source tree, with '+' if it has local changes.

    '' outside of one, or where there is no git.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "-uno") else "")
