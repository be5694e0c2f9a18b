"""How a text is read and scored, and the reader and the stream that do so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamh2o.cache.quantised_slots import require_bits
from streamh2o.errors import UsageError
from streamh2o.policies import Policy
from streamh2o.policies.base import require_whole
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.text import Source, TokenReader

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

_VALUES = {
    "bos": ("auto", "yes", "no"),
    "newline": ("keep", "lf"),
    "errors": ("strict", "replace"),
    "per_head": ("kv", "query"),
    "evict": ("chunk", "token"),
}


@dataclass(frozen=True)
class RunOptions:
    """How a text is read and scored.

    chunk and max_tokens in tokens; window in losses. per_head: `kv` keeps slots for each KV head, `query` for each
    query head, as the H2O authors' code does, for so many times the memory. evict: after each `chunk`, or after each
    `token`. kv_bits: 8 or 4 to quantise older slots. score: whether losses are wanted. The rest: see `TokenReader`.
    """

    chunk: int = 256
    max_tokens: int | None = None
    bos: str = "auto"
    newline: str = "keep"
    errors: str = "strict"
    allow_special: bool = False
    window: int = 1000
    per_head: str = "kv"
    evict: str = "chunk"
    kv_bits: int = 16
    score: bool = True

    def __post_init__(self) -> None:
        for option, values in _VALUES.items():
            if getattr(self, option) not in values:
                flag, given = "--" + option.replace("_", "-"), getattr(self, option)
                raise UsageError(f"{flag} is {given!r}; it must be {', '.join(values[:-1])} or {values[-1]}.")
        require_whole("chunk", self.chunk)
        if self.max_tokens is not None:
            require_whole("max-tokens", self.max_tokens)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}; it must be at least 1.")
        require_bits(self.kv_bits, self.evict)

    def reading(self) -> dict[str, Any]:
        """What a result says of how its text was read, but for the BOS, which depends on the tokenizer too."""
        return {
            "max_tokens": self.max_tokens,
            "newline": self.newline,
            "errors": self.errors,
            "allow_special": self.allow_special,
        }


def open_reader(
    source: Source, tokenizer: Any, options: RunOptions, state: dict[str, Any] | None = None
) -> TokenReader:
    """The tokens of `source` as `options` want them read, from `state` on."""
    return TokenReader(
        source,
        tokenizer,
        errors=options.errors,
        newline=options.newline,
        bos=options.bos,
        max_tokens=options.max_tokens,
        allow_special=options.allow_special,
        state=state,
    )


def open_stream(loaded: Loaded, policy: Policy, options: RunOptions, batch: int = 1) -> ChunkStream:
    """An empty stream of `batch` texts as `options` want it.

    Raises UsageError where policy, options and model do not fit together, UserError where memory is short.
    """
    per_query_head = options.per_head == "query"
    return ChunkStream(
        loaded.model,
        policy,
        chunk=options.chunk,
        batch=batch,
        per_query_head=per_query_head,
        evict=options.evict,
        kv_bits=options.kv_bits,
        kernel=loaded.kernel,
    )
