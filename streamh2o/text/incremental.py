"""Ids of a text that comes piece by piece. They are those of the whole text, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from streamh2o.text.tokenize import Place, WindowTokenizer

WINDOW = 2048  # characters tokenised at once; about twice as many are held back until more text comes


class _More(Exception):
    """All text so far has been used, and more will come."""


class IncrementalTokenizer:
    """Gives the ids that no later text can change, and keeps the rest of the text until more comes.

    tokenizer, allow_special: see `WindowTokenizer`.
    """

    def __init__(self, tokenizer: Any, allow_special: bool = False) -> None:
        self._tokenizer = WindowTokenizer(tokenizer, allow_special=allow_special, window=WINDOW)
        self._start()

    def _start(self) -> None:
        self._text = ""  # from `_place` on
        self._place: Place | None = None
        self._given = 0  # ids behind `_place` that were handed out
        self._wanted = WINDOW  # characters of `_text` with which it is worth looking for more ids

    @property
    def held(self) -> str:
        """Text whose ids have not been given yet, and some characters before it."""
        return self._text

    def add(self, text: str) -> np.ndarray:
        """Add `text`. Returns the ids that are certain now, int64 [n]."""
        self._text += text
        if len(self._text) < self._wanted:
            return np.empty(0, np.int64)
        found = self._ids(ends=False)
        self._wanted = len(self._text) + WINDOW // 2
        return found

    def end(self) -> np.ndarray:
        """End the text. Returns the remaining ids, int64 [n]. What is added later is a new text."""
        found = self._ids(ends=True) if self._text else np.empty(0, np.int64)
        self._start()
        return found

    def _ids(self, ends: bool) -> np.ndarray:
        begin = self._place.byte if self._place else 0  # in characters, not bytes, here
        text, before, found = self._text, self._given, [np.empty(0, np.int64)]

        def chunks() -> Iterator[tuple[str, np.ndarray, int]]:
            yield text, np.arange(begin, begin + len(text)), begin + len(text)
            if not ends:
                raise _More

        try:
            for piece in self._tokenizer.pieces(chunks(), self._place):
                found.append(piece.ids[before:])
                before = 0
                self._place, self._given = piece.place, len(piece.ids)
                self._text = text[piece.place.byte - begin :]
        except _More:
            pass
        return np.concatenate(found)

    def state(self) -> dict[str, Any]:
        """Strings and numbers from which `load` goes on."""
        place = list(self._place) if self._place else None
        return {"text": self._text, "place": place, "given": self._given, "wanted": self._wanted}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self._text, self._given, self._wanted = state["text"], state["given"], state["wanted"]
        self._place = Place(*state["place"]) if state["place"] else None
