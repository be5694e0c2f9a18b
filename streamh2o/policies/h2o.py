"""Heavy-Hitter Oracle: keep what has received the most attention."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class H2O(Policy):
    """Sinks, recent tokens and the hitters by plain accumulated attention, at positions rolled in the cache.

    Source: arXiv 2306.14048, Algorithm 1, streamed as in its Figure 5 with the positions of arXiv 2309.17453.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "sinks, recent and hitters by accumulated attention"
