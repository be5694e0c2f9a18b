"""Where a run stands: what displays, logs and pictures are told after every chunk."""

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
    size is unknown. slots: held now per layer and KV head, and by kind in `composition`. halved: how often memory ran
    out so far, so that a chunk was read in two halves.
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
    halved: int = 0


Observer = Callable[[Progress], None]
