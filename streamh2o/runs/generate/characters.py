"""Tokens to text, one whole character at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LONGEST_HELD = 16  # tokens: no character has more, so that what is still no text then is none


class Characters:
    """Tokens to text: `feed` gives what has become complete, so that no character is ever cut in two."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        """before: the tokens that come before, of which the last few decide about a space."""
        self._tokenizer = tokenizer
        self._context = list(before)[-4:]
        self._held: list[int] = []

    def state(self) -> list[list[int]]:
        return [self._context, self._held]

    def load_state(self, state: list[list[int]]) -> None:
        """Raises ValueError where `state` is not what `state` gave."""
        if any(type(token) is not int or token < 0 for ids in state for token in ids):
            raise ValueError
        self._context, self._held = state

    def feed(self, token: int) -> str:
        self._held.append(token)
        text = self._text()
        if text.endswith("\ufffd") and len(self._held) < _LONGEST_HELD:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """What is left, complete or not."""
        return self._release(self._text()) if self._held else ""

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, text: str) -> str:
        self._context, self._held = (self._context + self._held)[-4:], []
        return text
