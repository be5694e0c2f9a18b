"""The versions that a result depends on."""

from __future__ import annotations

import platform

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
