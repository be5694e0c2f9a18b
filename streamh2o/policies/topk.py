"""Top-K: what the newest queries look at, however much attention a slot received before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamh2o.errors import UsageError
from streamh2o.policies.base import Middle
from streamh2o.policies.mixed import Mixed

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TopK(Mixed):
    """Keeps sinks and the slots with the most attention of the newest queries before the eviction; no sums are kept.

    Knobs: newest, how many queries count. share: see Mixed.

    Source: the "Top-K" baseline of arXiv 2306.14048, Table 8, which chooses anew at every query; a chunk evicts once,
    so that its last queries speak for the next chunk's.
    """

    rule: ClassVar[str] = "topk"

    newest: int = 16

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return 0, cache - sinks

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.newest < 1:
            raise UsageError(f"The newest of {self.name} are {self.newest} queries; at least 1 is needed.")

    def newest_weights(self, chunk: int, device: torch.device) -> Tensor:
        import torch

        return torch.arange(chunk, 0, -1, device=device) <= self.newest

    def priorities(self, layers: Sequence[Middle], seen: int) -> Sequence[Tensor]:
        return [self.hitters_first(m.scores, m.newest) for m in layers if m.newest is not None]
