"""What `llama-perplexity` of llama.cpp prints as "Final estimate"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from streamh2o.errors import UserError
from streamh2o.runs.windowed.base import Definition, Ids, Window
from streamh2o.text.reader import bos_id


class LlamaCpp(Definition):
    """Whole chunks of `context` tokens side by side; of each, the tokens after the middle one are scored.

    Where the tokenizer puts a BOS first, it takes the place of each chunk's first token. The tokens after the last
    whole chunk are left out, and a text of fewer than two chunks has no number.
    Source: llama.cpp, tools/perplexity/perplexity.cpp, `perplexity`.
    """

    name: ClassVar[str] = "llamacpp"
    default_context: ClassVar[int | None] = 512

    def __init__(self, context: int, bos: int | None = None) -> None:
        super().__init__(context)
        self.bos = bos

    @classmethod
    def make(cls, context: int, stride: int | None, tokenizer: Any) -> Definition:
        cls.refuse(stride)
        return cls(context, bos_id(tokenizer, "auto"))

    def windows(self, ids: Ids) -> Iterator[Window]:
        size = self.context
        if (count := ids.upto(2 * size)) < 2 * size:
            raise UserError(
                f"llama.cpp needs two chunks of {size} tokens, and the text has {count} tokens; lower --context."
            )
        scored = size - 1 - size // 2
        start = 0
        while ids.upto(start + size) == start + size:
            chunk = ids[start : start + size]
            if self.bos is not None:
                chunk[0] = self.bos
            if scored:
                yield Window(chunk, scored, scored)
            start += size
            ids.drop(start)
