"""One input, tokenised once for any number of runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from streamh2o.text.reader import Block, TokenReader
from streamh2o.text.sources import Source


class _Read(NamedTuple):
    """The counts of a TokenReader after a block."""

    block: Block
    tokens: int
    bytes_read: int
    words_read: int
    sha256: str
    complete: bool


@dataclass(eq=False)
class ReadText:
    """Everything that `reader` gives, in blocks of `size` tokens. Kept in memory, 16 bytes a token.

    sha256: of the bytes read; ids_sha256: of the token ids, so of everything that options of the reader change.
    """

    source: Source
    size: int
    reads: list[_Read] = field(default_factory=list)
    tokens: int = 0
    sha256: str = ""
    ids_sha256: str = ""
    bos_added: bool = False
    exact: bool = True

    @classmethod
    def of(cls, reader: TokenReader, size: int) -> ReadText:
        """Read to the end. Raises UserError as `TokenReader.read` does."""
        text, digest = cls(reader.source, size), hashlib.sha256()
        for block in reader.blocks(size):
            digest.update(np.ascontiguousarray(block.ids, dtype="<i8").tobytes())
            text.reads.append(
                _Read(block, reader.tokens, reader.bytes_read, reader.words_read, reader.sha256, reader.complete)
            )
        text.tokens, text.sha256, text.ids_sha256 = reader.tokens, reader.sha256, digest.hexdigest()
        text.bos_added, text.exact = reader.bos_added, reader.exact
        return text

    @property
    def length(self) -> int:
        """Number of tokens, the BOS included: what a model has to hold to see all of it."""
        return self.tokens + self.bos_added


class Replay:
    """Takes the place of the TokenReader that `text` was read from: the same blocks, the same counts."""

    def __init__(self, text: ReadText) -> None:
        self._text = text
        self._next = 0
        self.source = text.source
        self.bos_added, self.exact = text.bos_added, text.exact
        self.tokens = self.bytes_read = self.words_read = 0
        self.sha256 = hashlib.sha256().hexdigest()
        self.complete = False

    def read(self, size: int) -> Block | None:
        """The next block; `size` is that of the text's blocks."""
        if size != self._text.size:
            raise ValueError(f"the text was read in blocks of {self._text.size} tokens, not {size}")
        if self._next == len(self._text.reads):
            return None
        block, self.tokens, self.bytes_read, self.words_read, self.sha256, self.complete = self._text.reads[self._next]
        self._next += 1
        return block

    def close(self) -> None:
        """Nothing is open."""
