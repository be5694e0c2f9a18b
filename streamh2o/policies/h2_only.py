"""Heavy hitters without a recent window."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class H2Only(Policy):
    """Keeps sinks and the hitters by plain accumulated attention; the newest tokens compete for a slot like any other.

    Knobs: those of every policy, but no recent window.

    Source: the column "w. H2" of arXiv 2306.14048, Table 9, which shows what the recent window is for.
    """

    name: ClassVar[str] = "h2-only"

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return 0, cache - sinks

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent:
            raise UsageError(f"The policy {self.name} has no recent window; leave --recent out, or use h2o.")
