"""Perplexity as other tools define it: which tokens are scored, with which context, and divided by what."""

from __future__ import annotations

from typing import Any

from streamh2o.errors import UsageError
from streamh2o.runs.windowed.base import Definition
from streamh2o.runs.windowed.hf import HuggingFace
from streamh2o.runs.windowed.llamacpp import LlamaCpp
from streamh2o.runs.windowed.lmeval import LmEval

DEFINITIONS: dict[str, type[Definition]] = {kind.name: kind for kind in (HuggingFace, LlamaCpp, LmEval)}


def make_definition(name: str, trained: int, tokenizer: Any, context: int | None, stride: int | None) -> Definition:
    """The definition called `name` for a model of `trained` positions; None: the tool's own default.

    Raises UsageError where it has no such setting, or the model no room for it.
    """
    kind = DEFINITIONS[name]
    if context is None:
        context = min(kind.default_context or trained, trained)
    if not 2 <= context <= trained:
        raise UsageError(f"--context is {context}; it must lie between 2 and the {trained} positions of this model.")
    return kind.make(context, stride, tokenizer)
