"""The default: heavy hitters by the recent mean of their long-range attention, at their true distance."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamh2o.policies.base import Policy, Positions

LEAST_QUERIES = 16  # a mean of fewer queries is noise


@dataclass(frozen=True)
class StreamH2O(Policy):
    """Sinks, recent tokens and the middle tokens that far queries look at.

    Four things differ from plain H2O; docs/quality.md has what each is worth:
    - attention from nearby queries does not count (`far`), since the window serves those anyway;
    - old attention fades (`decay`), since a novel moves on;
    - the score is divided by what the queries that could give it count together, so it is a fading mean. A sum
      favours those that have been kept for long, and a token that has just left the window loses to them however
      much the few queries far enough away look at it;
    - hitters stay at their true distance (`positions`) while the sinks keep close.
    """

    name: ClassVar[str] = "streamh2o"
    summary: ClassVar[str] = "sinks, recent, and hitters by the fading mean of far attention, at true distance"

    positions: Positions = "distance"
    decay: float = 0.9

    @classmethod
    def default_far(cls, recent: int) -> int:
        """Half the window, so that a token leaving it has been judged by as many queries; never more than 128."""
        return min(128, recent // 2)

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        queries = (seen - source_index - self.far).clamp(min=LEAST_QUERIES)  # that counted, newest weight 1
        if self.decay == 1:
            return scores / queries
        return scores / (1 - self.decay ** (queries / 256))  # up to a factor that is the same for all
