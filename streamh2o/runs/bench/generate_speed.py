"""Speed of `model.generate` with a StreamCache against the cache of `transformers` that grows, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from streamh2o.cache.memory_check import slot_bytes
from streamh2o.runs.bench.race import clock, synchronize
from streamh2o.stream.lending import cache_argument
from streamh2o.stream.stream_cache import StreamCache

FULL = "transformers"
POLICIES = ("h2o", "streamh2o")
WARM = 64  # most tokens of a prompt that is only there to warm up


@dataclass(frozen=True)
class Job:
    """One contestant's work: `batch` prompts of `prompt` tokens, `new` tokens after each.

    slots: of the cache, None for the one that grows. chunk: most tokens of one pass over the prompt with a cache.
    """

    name: str
    batch: int
    prompt: int
    new: int
    slots: int | None
    chunk: int

    def row_bytes(self, model: PreTrainedModel) -> int:
        """What one row of the batch needs: keys and values, of a StreamCache the rotated keys and the room too."""
        layers, heads, size = slot_bytes(model)
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        key = head_dim * model.dtype.itemsize
        if self.slots is None:
            return layers * heads * (self.prompt + self.new) * 2 * key
        return layers * heads * (self.slots + self.chunk) * (size + key)


@dataclass(frozen=True)
class Duration:
    """Seconds until the first token, and for each further one."""

    first: float
    step: float
    whole: float


class _Clock(StoppingCriteria):
    """Never stops; notes when each token came."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.now = model, clock(model)
        self.times = [self.now()]

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        synchronize(self.model)
        self.times.append(self.now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run_once(model: PreTrainedModel, job: Job, new: int) -> Duration:
    """Generate `new` tokens, at least 2, greedily, after random prompts."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids: Tensor = torch.randint(0, vocabulary, (job.batch, job.prompt), generator=generator).to(model.device)
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    cache = None
    if job.slots is not None:
        cache = StreamCache.for_model(model, cache=job.slots, policy=job.name, chunk=job.chunk)
        arguments[cache_argument(model)] = cache
    clock = _Clock(model)
    arguments["stopping_criteria"] = StoppingCriteriaList([clock])
    try:
        generate: Any = model.generate
        generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **arguments)
    finally:
        if cache is not None:
            cache.detach()
    start, first, *_, last = clock.times
    return Duration(first - start, (last - first) / (new - 1), last - start)


def jobs_of(batch: int, prompt: int, new: int, share: float, chunk: int) -> list[Job]:
    """The same work for the growing cache and for each policy with `share` of the prompt."""
    slots = max(8, int(prompt * share))
    return [Job(FULL, batch, prompt, new, None, chunk), *(Job(p, batch, prompt, new, slots, chunk) for p in POLICIES)]


def largest(model: PreTrainedModel, jobs: Sequence[Job], limit: int) -> list[Job]:
    """Each job with the largest batch whose caches fit into `limit` bytes, without those that fit none."""
    made = []
    for job in jobs:
        batch = limit // job.row_bytes(model)
        if batch:
            made.append(replace(job, batch=batch))
    return made


@torch.inference_mode()
def bench_generate(
    model: PreTrainedModel,
    batches: Sequence[int],
    prompts: Sequence[int],
    news: Sequence[int],
    *,
    share: float = 0.2,
    chunk: int = 256,
    memory_limit: int | None = None,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time each batch x prompt x new tokens, and with a `memory_limit` (bytes of cache) the largest batches under it.

    Returns plain numbers: `cases`, each with `rows` (name, batch, cache_bytes, tokens_per_second, first_seconds,
    step_seconds, and `times_as_fast`, `first_ratio`, `step_ratio`: medians over the rounds of how it compares with the
    growing cache in the same round, None where that did not fit).
    """
    cases: list[dict[str, Any]] = []
    for largest_batch, jobs in _cases(model, batches, prompts, news, share, chunk, memory_limit):
        tell(f"batch {', '.join(str(job.batch) for job in jobs)}, prompt {jobs[0].prompt}, new {jobs[0].new}")
        for job in jobs:
            run_once(model, replace(job, prompt=min(job.prompt, WARM)), 2)
        seconds: dict[str, list[Duration]] = {job.name: [] for job in jobs}
        for _ in range(rounds):
            for job in jobs:
                seconds[job.name].append(run_once(model, job, job.new))
        rows = [_row(model, job, seconds[job.name], seconds.get(FULL), jobs[0]) for job in jobs]
        cases.append({"prompt": jobs[0].prompt, "new": jobs[0].new, "largest_batch": largest_batch, "rows": rows})
    about = {"share": share, "chunk": chunk, "rounds": rounds, "memory_limit": memory_limit}
    return {**about, "clock": clock(model).__name__, "cases": cases}


def _cases(
    model: PreTrainedModel,
    batches: Sequence[int],
    prompts: Sequence[int],
    news: Sequence[int],
    share: float,
    chunk: int,
    limit: int | None,
) -> Iterator[tuple[bool, list[Job]]]:
    for prompt in prompts:
        for new in news:
            for batch in batches:
                yield False, jobs_of(batch, prompt, new, share, chunk)
            if limit is not None and (jobs := largest(model, jobs_of(1, prompt, new, share, chunk), limit)):
                yield True, jobs


def _row(
    model: PreTrainedModel, job: Job, mine: list[Duration], full: list[Duration] | None, other: Job
) -> dict[str, Any]:
    def against(what: Callable[[Duration], float]) -> float | None:
        return None if full is None else median(what(a) / what(b) for a, b in zip(full, mine, strict=True))

    whole = against(lambda each: each.whole)
    return {
        "name": job.name,
        "batch": job.batch,
        "slots": job.slots,
        "cache_bytes": job.batch * job.row_bytes(model),
        "tokens_per_second": job.batch * job.new / median(each.whole for each in mine),
        "first_seconds": median(each.first for each in mine),
        "step_seconds": median(each.step for each in mine),
        "times_as_fast": None if whole is None else whole * job.batch / other.batch,
        "first_ratio": against(lambda each: each.first),
        "step_ratio": against(lambda each: each.step),
    }
