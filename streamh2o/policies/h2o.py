"""Heavy-Hitter Oracle: keep what has received the most attention."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps sinks, recent tokens and the hitters by plain accumulated attention, at positions rolled in the cache.

    Knobs: those of every policy.

    Source: arXiv 2306.14048, Algorithm 1, streamed as in its Figure 5 with the positions of arXiv 2309.17453.
    """

    name: ClassVar[str] = "h2o"
