"""What a definition is: a text's ids cut into windows, each read by itself, and the losses of it that count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from streamh2o.errors import UsageError


class Window(NamedTuple):
    """ids: int64 [n], read from an empty cache; of its n - 1 losses the last `scored` are summed.

    The sum times `weight` goes to the total, and `divisor` to what that is divided by.
    """

    ids: np.ndarray
    scored: int
    divisor: int
    weight: float = 1.0


class Definition(ABC):
    """How one tool computes perplexity.

    context: most tokens that the model reads at once. per_word_and_byte: every token is scored once, so that the sum
    may be divided by words and bytes too.
    """

    name: ClassVar[str]
    default_context: ClassVar[int | None] = None  # None: as many as the model was trained on
    per_word_and_byte: ClassVar[bool] = False
    context: int

    def __init__(self, context: int) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def make(cls, context: int, stride: int | None, tokenizer: Any) -> Definition:
        """One with these settings. Raises UsageError for a stride where there is none."""

    @classmethod
    def refuse(cls, stride: int | None) -> None:
        if stride is not None:
            raise UsageError(f"--stride belongs to --ppl-def hf; {cls.name} has none.")

    @abstractmethod
    def windows(self, ids: Ids) -> Iterator[Window]:
        """The windows of a text, in order. Raises UserError where the tool has no number for it."""


class Ids:
    """The ids of a text by their index, read as they are asked for; only those since the last `drop` are held.

    read: gives the next ids, at most so many, and None at the end.
    """

    def __init__(self, read: Callable[[int], np.ndarray | None]) -> None:
        self._read = read
        self._held = np.empty(0, np.int64)
        self._first = 0  # index of the first one held
        self._ended = False

    def upto(self, end: int) -> int:
        """`end`, or the number of ids there are, whichever is less."""
        while not self._ended and self._first + len(self._held) < end:
            block = self._read(end - self._first - len(self._held))
            if block is None:
                self._ended = True
            else:
                self._held = np.concatenate([self._held, block])
        return min(end, self._first + len(self._held))

    def __getitem__(self, span: slice) -> np.ndarray:
        return self._held[span.start - self._first : span.stop - self._first].copy()

    def drop(self, before: int) -> None:
        """Forget the ids before this index."""
        self._held = self._held[before - self._first :]
        self._first = before
