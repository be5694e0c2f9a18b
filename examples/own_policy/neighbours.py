"""A policy in a package of its own; streamh2o finds it by the entry point in pyproject.toml."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamh2o import Policy


@dataclass(frozen=True)
class Neighbours(Policy):
    """Hitters by attention to a slot and its two neighbours, so that short phrases stay whole.

    own: what the slot's own score counts, against one for each neighbour.
    """

    name: ClassVar[str] = "neighbours"

    own: float = 2.0

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        padded = scores.new_zeros(*scores.shape[:-1], scores.shape[-1] + 2)
        padded[..., 1:-1] = scores
        return padded[..., :-2] + self.own * scores + padded[..., 2:]
