"""The strided sliding window of the `transformers` documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from streamh2o.errors import UsageError
from streamh2o.runs.windowed.base import Definition, Ids, Window


class HuggingFace(Definition):
    """Windows of `context` tokens that begin every `stride` tokens; each scores what the one before did not reach.

    The documented loop multiplies the mean loss of a window by one less than the tokens that are new in it, and divides
    by the sum of these. That is exact for the first window; in the others, where all of the new tokens have a loss, it
    gives each of them (new - 1) / new of its weight. It is kept as it is documented.
    Source: transformers, docs/source/en/perplexity.md.
    """

    name: ClassVar[str] = "hf"

    def __init__(self, context: int, stride: int = 512) -> None:
        super().__init__(context)
        self.stride = stride

    @classmethod
    def make(cls, context: int, stride: int | None, tokenizer: Any) -> Definition:
        stride = min(512, context) if stride is None else stride
        if not 1 <= stride <= context:
            raise UsageError(f"--stride is {stride}; it must lie between 1 and --context, here {context}.")
        return cls(context, stride)

    def windows(self, ids: Ids) -> Iterator[Window]:
        begin = reached = 0
        while (end := ids.upto(begin + self.context)) > reached:
            new, size = end - reached, end - begin
            scored = min(new, size - 1)
            if scored:
                yield Window(ids[begin:end], scored, new - 1, (new - 1) / scored)
            if ids.upto(end + 1) == end:
                return
            reached = end
            begin += self.stride
            ids.drop(begin)
