"""StreamingLLM: sinks and a recent window."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first tokens as attention sinks and the newest tokens, at positions rolled in the cache.

    Knobs: those of every policy, but no hitters.

    Source: arXiv 2309.17453, section 3.2.
    """

    name: ClassVar[str] = "streamingllm"
    scored: ClassVar[bool] = False

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return cache - sinks, 0
