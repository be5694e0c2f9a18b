"""Several ways of doing something timed in turn in one process, and compared round by round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel

Contestants = dict[str, tuple[int, Callable[[], object]]]  # tokens a call and the call, by name


@dataclass(frozen=True)
class Timing:
    """What one contestant did: `tokens` a call and the `seconds` of each counted call."""

    name: str
    tokens: int
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / median(self.seconds)


def clock(model: PreTrainedModel) -> Callable[[], float]:
    """Seconds; of the processor where one thread does it all, so that other programs do not count."""
    alone = model.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def synchronize(model: PreTrainedModel) -> None:
    """Wait until the model's device has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def race(
    contestants: Contestants, rounds: int, warmup: int = 1, now: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """Call each contestant `(tokens a call, call)` once a round, in turn, so that a drift of the machine hits all."""
    seconds_of: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + rounds):
        for name, (_, call) in contestants.items():
            start = now()
            call()
            if turn >= warmup:
                seconds_of[name].append(now() - start)
    return [Timing(name, contestants[name][0], tuple(seconds)) for name, seconds in seconds_of.items()]


def ratio(timing: Timing, other: Timing) -> float:
    """Median over the rounds of how many times faster per token `timing` was than `other` in the same round."""
    pairs = zip(timing.seconds, other.seconds, strict=True)
    return median(theirs / other.tokens * timing.tokens / ours for ours, theirs in pairs)


def share(timing: Timing, limit: Timing) -> float:
    """Median over the rounds of the time `timing` took, in times of `limit`, per token."""
    return 1 / ratio(timing, limit)
