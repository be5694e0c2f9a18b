"""Stream texts of any length through a causal language model with a KV cache of fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamh2o.errors import UsageError, UserError
from streamh2o.versions import __version__

if TYPE_CHECKING:
    from streamh2o.api.answer import answer
    from streamh2o.api.compare import compare
    from streamh2o.api.generate import generate
    from streamh2o.api.inspect import inspect
    from streamh2o.api.perplexity import perplexity
    from streamh2o.models.load import load_model
    from streamh2o.policies import POLICIES, Policy, make_policy
    from streamh2o.stream.stream import Stream
    from streamh2o.stream.stream_cache import StreamCache

__all__ = [
    "POLICIES",
    "Policy",
    "Stream",
    "StreamCache",
    "UsageError",
    "UserError",
    "__version__",
    "answer",
    "compare",
    "generate",
    "inspect",
    "load_model",
    "make_policy",
    "perplexity",
]

_FROM = {
    "POLICIES": "policies",
    "Policy": "policies",
    "Stream": "stream.stream",
    "StreamCache": "stream.stream_cache",
    "answer": "api.answer",
    "compare": "api.compare",
    "generate": "api.generate",
    "inspect": "api.inspect",
    "load_model": "models.load",
    "make_policy": "policies",
    "perplexity": "api.perplexity",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: torch takes a second."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
