"""SpAtten: one ranking of the tokens for the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamh2o.policies.base import Middle, Policy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SpAtten(Policy):
    """Keeps sinks and the tokens with the most attention summed over all heads and layers, the same in every layer.

    Knobs: those of every policy. There is no recent window by default.

    Source: arXiv 2012.09852, section III.A (cascade token pruning, without its pruning of heads and its quantisation),
    as a baseline in arXiv 2306.14048, section C.9 and Table 11, which names the missing recent window as the other
    difference to H2O; --recent puts one back.
    """

    name: ClassVar[str] = "spatten"
    across_layers: ClassVar[bool] = True

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return 0, cache - sinks

    def priorities(self, layers: Sequence[Middle], seen: int) -> Sequence[Tensor]:
        total = layers[0].scores.sum(dim=1, keepdim=True)  # [batch, 1, middle]
        for layer in layers[1:]:
            total = total + layer.scores.sum(dim=1, keepdim=True).to(total.device)
        return [total.to(layer.scores.device).expand_as(layer.scores) for layer in layers]
