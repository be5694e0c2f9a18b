"""Packages that only some commands need: the extra of pyproject.toml that brings each, and how to say it is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from streamh2o.errors import UserError

_EXTRA = {"matplotlib": "plot", "datasets": "data", "pyarrow": "data"}


def installed(package: str) -> bool:
    """Whether `package` is there; it is not imported."""
    return importlib.util.find_spec(package) is not None


def require_package(package: str, what: str) -> None:
    """Raise UserError, with the command that installs `package`, where `what` needs it and it is not there."""
    if not installed(package):
        raise UserError(
            f"{what} needs {package}, which is not installed; install it with: "
            f"pip install 'streamh2o[{_EXTRA[package]}]'"
        )


def notes_on_missing(files: dict[str, str]) -> Iterator[str]:
    """A sentence for each package of `files` that is not there: the files named with it will not be written."""
    for package, names in files.items():
        if not installed(package):
            yield (
                f"{package} is not installed, so {names} will not be written; to have that too, run "
                f"pip install 'streamh2o[{_EXTRA[package]}]' and this command again"
            )
