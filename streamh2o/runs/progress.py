"""Where a run stands after every chunk, and what shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a chunk.

    token, byte: tokens (without a BOS) and bytes of the input so far. nll: sum of the chunk's losses in nats; n: how
    many there are; losses: float32 [n]. ppl, ppl_window: running and windowed perplexity, None before the first loss.
    tokens_per_second: over the last ten seconds; seconds: since reading began. fraction: of the input, None where its
    size is unknown. slots: held now per layer and KV head, and by kind in `composition`.
    """

    name: str
    token: int
    byte: int
    nll: float
    n: int
    losses: np.ndarray
    ppl: float | None
    ppl_window: float | None
    window: int
    tokens_per_second: float
    seconds: float
    fraction: float | None
    rss_bytes: int
    slots: int
    budget: int
    composition: dict[str, int]


Observer = Callable[[Progress], None]


class Display:
    """The display of `--quiet`, which shows nothing. The others have the same methods."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def begin(self, name: str, number: int = 1, of: int = 1) -> None:
        """An input starts: its name, its number, and how many inputs there are."""

    def __call__(self, progress: Progress) -> None:
        """A chunk is done."""

    def note(self, text: str) -> None:
        """Something that the user should know, once."""

    def end(self) -> None:
        """The input is done, or the run is."""
