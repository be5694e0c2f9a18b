"""Where in the input the held tokens and their surroundings stand, in memory that the text's length does not set."""

from __future__ import annotations

import numpy as np

AROUND = 25  # tokens before and after a held one that are remembered
_SLACK = 1 << 16  # tokens by which the list may grow between two cleanings


class Places:
    """Byte offsets of tokens of a stream, of which those far from every held token are forgotten.

    What is still held later was held all along, so its surroundings are never lost.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(0, np.int64)  # rising
        self._starts = np.zeros(0, np.int64)
        self._new: list[np.ndarray] = []
        self._seen = 0
        self._waiting = 0
        self._cleaned = 0  # how many stayed at the last cleaning
        self.end = 0  # byte after the last token

    def __len__(self) -> int:
        return len(self._tokens) + self._waiting

    def add(self, starts: np.ndarray, end: int) -> None:
        """The next tokens' first bytes, int64 [n], and the byte after the last of them."""
        self._new.append(starts)
        self._waiting += len(starts)
        self.end = end

    def _gather(self) -> None:
        fresh = np.arange(self._seen, self._seen + self._waiting)
        self._tokens = np.concatenate([self._tokens, fresh])
        self._starts = np.concatenate([self._starts, *self._new])
        self._seen += self._waiting
        self._new, self._waiting = [], 0

    def prune(self, held: np.ndarray, sinks: int, recent: int) -> None:
        """Now and then forget what is farther than AROUND from every token that is in `held`, below `sinks`, or not
        below `recent`."""
        if len(self) < 2 * self._cleaned + _SLACK:
            return
        self._gather()
        wanted = np.unique(np.concatenate([held.reshape(-1), np.arange(sinks)]))
        at = np.searchsorted(wanted, self._tokens)
        far = np.iinfo(np.int64).max // 2
        padded = np.concatenate([[-far], wanted, [far]])
        near = np.minimum(self._tokens - padded[at], padded[at + 1] - self._tokens) <= AROUND
        near |= self._tokens >= recent - AROUND
        self._tokens, self._starts = self._tokens[near], self._starts[near]
        self._cleaned = len(self._tokens)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """The first byte of each of `tokens`, int64 [n], rising; all must lie within AROUND of a held one."""
        self._gather()
        at = np.searchsorted(self._tokens, tokens)
        if len(at) and (at[-1] >= len(self._tokens) or (self._tokens[at] != tokens).any()):
            raise LookupError("not all of these tokens are near a held one")
        result: np.ndarray = self._starts[at]
        return result

    def borders(self, first: int, stop: int) -> np.ndarray:
        """The first bytes of tokens `first` to `stop`, and the byte after the last: int64 [stop - first + 1].

        Token `stop` too must lie within AROUND of a held one.
        """
        starts = self.of(np.arange(first, min(stop + 1, self._seen + self._waiting)))
        return starts if len(starts) > stop - first else np.append(starts, self.end)
