"""What a policy is: how slots are scored and chosen, and which positions they get."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from numbers import Integral, Real
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

from streamh2o.errors import UsageError, UserError, out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Positions = Literal["rolled", "distance"]


class Middle(NamedTuple):
    """The slots of one layer among which an eviction chooses: neither sinks nor recent, in the order of the stream.

    scores: float32, as the policy accumulated them. source_index: int64, the token's index in the stream. newest:
    float32, the attention of the last pass alone, by `Policy.newest_weights`; None where the policy asks for none. All
    are [batch, kv_heads, middle].
    """

    scores: Tensor
    source_index: Tensor
    newest: Tensor | None = None


def alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The pairs of all layers' tensors, in order, those together that can be one: of one shape, on one device.

    A few operations for all layers take a small part of the time of as many for each.
    """
    pairs = zip(first, second, strict=True)
    for _, group in groupby(pairs, key=lambda pair: (pair[0].shape, pair[0].device)):
        yield list(group)


def require_whole(name: str, value: object) -> None:
    """Raise UsageError where the knob `name` is no whole number."""
    if not isinstance(value, Integral):
        raise UsageError(f"--{name} is {value!r}; it must be a whole number.")


@dataclass(frozen=True)
class Policy:
    """Keeps `sinks` first tokens, `recent` newest tokens and the `hitters` middle tokens of highest priority.

    A subclass is a small frozen dataclass; its fields are its knobs. It says how the attention of a chunk becomes
    scores (`scored`, `far`, `decay`) and who survives (`divisor`, or in its own way `priority`). All counts are slots
    per layer and KV head.

    cache: the budget, sinks + hitters + recent, kept after an eviction.
    positions: `rolled` gives slots 0..n-1 in cache order (StreamingLLM, section 3.2); `distance` leaves hitters at
        their true distance from the query and the sinks just outside the window; what is farther than the model was
        trained to look goes first.
    far: only attention from queries at least so many tokens away counts (0: all of it).
    decay: what is left of a score after another 256 tokens (1: sums never fade).
    """

    name: ClassVar[str] = ""
    scored: ClassVar[bool] = True  # whether attention has to be summed at all
    evicts: ClassVar[bool] = True  # False: the text must fit the model
    recomputes: ClassVar[bool] = False  # True: nothing is cached between chunks
    across_layers: ClassVar[bool] = False  # True: `priorities` of a layer depend on the other layers
    default_sinks: ClassVar[int] = 4

    cache: int
    sinks: int
    recent: int
    hitters: int
    positions: Positions = "rolled"
    far: int = 0
    decay: float = 1.0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        """Default (recent, hitters) of a budget: the H2O paper halves it."""
        recent = (cache - sinks + 1) // 2
        return recent, cache - sinks - recent

    @classmethod
    def defaults(cls, cache: int, recent: int) -> dict[str, int]:
        """Defaults of further knobs that follow the budget and the window."""
        return {}

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type in (int, "int"):
                require_whole(each.name, value)
            elif each.type in (float, "float") and not isinstance(value, Real):
                raise UsageError(f"--{each.name} is {value!r}; it must be a number.")
        if self.positions not in get_args(Positions):
            raise UsageError(f"--positions is {self.positions!r}; it must be {' or '.join(get_args(Positions))}.")
        if self.sinks < 0:
            raise UsageError(f"--sinks is {self.sinks}; it must be at least 0.")
        if min(self.recent, self.hitters) < 0:
            raise UsageError(
                f"The cache of {self.cache} slots cannot hold {self.sinks} sinks, {self.recent} recent tokens and "
                f"{self.hitters} hitters; raise --cache or lower one of them."
            )
        if self.sinks + self.recent + self.hitters != self.cache:
            raise UsageError(
                f"--sinks {self.sinks} + --recent {self.recent} + --hitters {self.hitters} make "
                f"{self.sinks + self.recent + self.hitters}, not --cache {self.cache}; leave one of them out."
            )
        if self.cache - self.sinks < 1:
            raise UsageError(
                f"--cache {self.cache} leaves no slot beside {self.sinks} sinks; it must be at least {self.sinks + 1}."
            )
        if not 0 < self.decay <= 1:
            raise UsageError(f"--decay is {self.decay}; it must be above 0 and at most 1.")
        if not 0 <= self.far <= max(self.recent, 0):
            raise UsageError(f"--far is {self.far}; it must lie between 0 and --recent, here {self.recent}.")

    def query_weights(self, chunk: int, device: torch.device) -> Tensor:
        """What the attention of each of a chunk's queries counts when the chunk ends: [chunk], newest last."""
        import torch

        age = torch.arange(chunk - 1, -1, -1, dtype=torch.float32, device=device)
        return self.decay ** (age / 256)

    def newest_weights(self, chunk: int, device: torch.device) -> Tensor | None:
        """Like `query_weights`, for sums kept apart from the scores and forgotten at the next chunk; None for none."""
        return None

    def fade(self, chunk: int) -> float:
        """What older scores count after a chunk of this many tokens."""
        return float(self.decay ** (chunk / 256))

    def divisor(self, age: Tensor) -> Tensor | None:
        """By what `priority` divides the score of a token of this age (int64, the newest token's is 1): float32, inf
        for what goes first; None: it does not. Each age for itself, since compiled code looks it up in a table."""
        return None

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        """Which middle slots to keep: the `hitters` highest, by head. Arguments and result are
        [batch, kv_heads, middle]; `seen` is the number of tokens of the stream so far."""
        divisor = self.divisor(seen - source_index)
        return scores if divisor is None else (scores / divisor).masked_fill(divisor.isinf(), -math.inf)

    def priorities(self, layers: Sequence[Middle], seen: int) -> Sequence[Tensor]:
        """`priority` of every layer; called once per eviction, for policies that need more than `priority` is given.

        A policy that looks across layers says so by `across_layers`; the others may be asked one layer at a time.
        """
        import torch

        if type(self).priority is not Policy.priority:
            return [self.priority(middle.scores, middle.source_index, seen) for middle in layers]
        priorities: list[Tensor] = []
        for group in alike([middle.scores for middle in layers], [middle.source_index for middle in layers]):
            scores, source_index = (torch.cat(tensors) for tensors in zip(*group, strict=True))
            priorities += self.priority(scores, source_index, seen).chunk(len(group))
        return priorities


def checked_priorities(policy: Policy, layers: Sequence[Middle], seen: int) -> Sequence[Tensor]:
    """`policy.priorities`, of which a policy that is not ours could make anything.

    Raises UserError, which names the policy, where it fails or does not give a number for every slot.
    """
    if type(policy).__module__.startswith("streamh2o."):
        return policy.priorities(layers, seen)
    whose = f"The policy {policy.name or type(policy).__name__}"
    try:
        found = list(policy.priorities(layers, seen))
        shapes = [list(each.shape) for each in found]
        spoilt = any(bool(each.isnan().any()) for each in found if each.is_floating_point())
    except Exception as error:
        if isinstance(error, UserError) or out_of_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{whose} can't say what to keep ({reason[:200]}); mend its priority.") from error
    wanted = [list(middle.scores.shape) for middle in layers]
    if shapes != wanted:
        raise UserError(f"{whose} gives priorities of the shapes {shapes} for slots of the shapes {wanted}; mend it.")
    if spoilt or any(str(each.dtype) == "torch.bool" for each in found):
        raise UserError(f"{whose} gives priorities that are no numbers; mend it.")
    return found
