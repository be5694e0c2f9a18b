"""The versions that a result depends on."""

from __future__ import annotations

import platform
import re

__version__ = "0.2.0"  # pyproject.toml reads it here


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    import tokenizers
    import torch
    import transformers

    return {
        "streamh2o": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def leading_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "5.24.0.dev0" to (5, 24, 0)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()
