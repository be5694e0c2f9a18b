"""Losses to perplexity: sums in float64, over all tokens and over the newest ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from streamh2o.errors import UserError


def exp(nats: float | None) -> float | None:
    """e to the power of `nats`; None for None, and where the result is too large for a float."""
    if nats is None:
        return None
    try:
        return math.exp(nats)
    except OverflowError:
        return None


class RunningPerplexity:
    """Perplexity of a stream of losses, which arrive chunk by chunk.

    It is the exponential of the sum of all losses over their count, never a mean of means, and sums are float64.
    window: how many of the newest losses `window_ppl` looks at.

    Attributes: `nll_sum` (nats) and `scored` (losses so far). Whatever divides by a count is None while that is zero.
    """

    def __init__(self, window: int = 1000) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        self.window = window
        self.nll_sum = 0.0
        self.scored = 0
        self._recent = np.zeros(window)  # ring: the loss number i of the stream stands at i % window

    def add(self, losses: np.ndarray) -> float:
        """Take the next losses, float [n], in nats; returns their sum.

        Raises UserError, and takes none of them, if one is not a finite number.
        """
        losses = np.asarray(losses, dtype=np.float64).reshape(-1)
        finite = np.isfinite(losses)
        if not finite.all():
            index = self.scored + int(np.argmin(finite))
            raise UserError(f"Loss number {index} of the text is not a finite number; try --dtype float32.")
        total = float(losses.sum())
        self.nll_sum += total
        newest = losses[-self.window :]
        first = self.scored + len(losses) - len(newest)
        self._recent[np.arange(first, first + len(newest)) % self.window] = newest
        self.scored += len(losses)
        return total

    @property
    def nll_mean(self) -> float | None:
        """Nats a token."""
        return self.nll_sum / self.scored if self.scored else None

    @property
    def ppl(self) -> float | None:
        """Perplexity per token."""
        return exp(self.nll_mean)

    @property
    def window_ppl(self) -> float | None:
        """Perplexity per token of the newest `window` losses, or of all while there are fewer."""
        count = min(self.scored, self.window)
        return exp(float(self._recent[:count].sum()) / count) if count else None

    def bits_per_byte(self, byte_count: int) -> float | None:
        """Bits that the text costs per byte of it; comparable between tokenizers."""
        return self.nll_sum / math.log(2) / byte_count if byte_count and self.scored else None

    def ppl_word(self, words: int) -> float | None:
        """Perplexity per word, as language modelling papers report it: all losses over the number of words.

        None too where it is too large for a float, as in a text that hardly has a space.
        """
        return exp(self.nll_sum / words) if words and self.scored else None

    def state(self) -> dict[str, Any]:
        """JSON-able; floats survive JSON unchanged, so a resumed sum has the same digits."""
        return {
            "window": self.window,
            "nll_sum": self.nll_sum,
            "scored": self.scored,
            "recent": self._recent[: min(self.scored, self.window)].tolist(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises UserError where it is damaged."""
        try:
            window, scored, recent = int(state["window"]), int(state["scored"]), state["recent"]
            if window < 1 or len(recent) != min(scored, window) or not math.isfinite(state["nll_sum"]):
                raise ValueError
            ring = np.zeros(window)
            ring[: len(recent)] = recent
        except (KeyError, TypeError, ValueError):
            raise UserError("The saved sums of losses are damaged; start anew or use an older checkpoint.") from None
        self.window, self.scored, self.nll_sum, self._recent = window, scored, float(state["nll_sum"]), ring
