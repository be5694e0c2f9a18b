"""Speed as ratios within one process: the stream against the matrix products that no stream can do without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamh2o.cache.positions import rotated
from streamh2o.kernels.attention import attend_and_sum
from streamh2o.kernels.gguf_linear import GgufLinear
from streamh2o.kernels.select import Kernel
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream

Contestants = dict[str, tuple[int, Callable[[], object]]]  # tokens a call and the call, by name

LIMIT = "linear layers alone"
LOOP = 16  # tokens a round where each is a pass of its own


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


def race(
    contestants: Contestants, rounds: int, warmup: int = 1, now: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """Call each contestant `(tokens a call, call)` once a round, in turn, so that a drift of the machine hits all."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + rounds):
        for name, (_, call) in contestants.items():
            start = now()
            call()
            if turn >= warmup:
                taken[name].append(now() - start)
    return [Timing(name, contestants[name][0], tuple(seconds)) for name, seconds in taken.items()]


def ratio(timing: Timing, other: Timing) -> float:
    """Median over the rounds of how many times faster per token `timing` was than `other` in the same round."""
    pairs = zip(timing.seconds, other.seconds, strict=True)
    return median(theirs / other.tokens * timing.tokens / ours for ours, theirs in pairs)


def share(timing: Timing, limit: Timing) -> float:
    """Median over the rounds of the time `timing` took, in times of `limit`, per token."""
    return 1 / ratio(timing, limit)


def linear_layers(model: PreTrainedModel, chunk: int) -> Callable[[], None]:
    """One call multiplies every linear layer of the model, the output embedding too, with `chunk` random rows.

    As `transformers` does it, whatever the model is attached to.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | GgufLinear)]
    rows = {n: torch.randn(chunk, n, dtype=model.dtype, device=model.device) for n in {m.in_features for m in layers}}

    @torch.inference_mode()
    def call() -> None:
        for layer in layers:
            if isinstance(layer, GgufLinear):
                layer(rows[layer.in_features])
            else:
                nn.functional.linear(rows[layer.in_features], layer.weight, layer.bias)
        synchronize(model)

    return call


def random_ids(model: PreTrainedModel, count: int) -> Tensor:
    """Token ids [1, count]: speed does not depend on what they say."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(0))


def synchronize(model: PreTrainedModel) -> None:
    """Wait until the model's device has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _to_the_end(call: Callable[[], object], model: PreTrainedModel) -> Callable[[], None]:
    """A GPU goes on after a call has returned."""

    def whole() -> None:
        call()
        synchronize(model)

    return whole


class WarmStream:
    """A stream whose cache is full, so that each call of `feed` is one chunk of the steady state."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        policy: str,
        cache: int,
        chunk: int,
        evict: str = "chunk",
        kernel: str | Kernel = "auto",
    ) -> None:
        self.stream = ChunkStream(model, make_policy(policy, cache), chunk=chunk, evict=evict, kernel=kernel)
        self.ids, self.chunk, self.at = ids, chunk, 0
        while self.stream.tokens <= cache:
            self.feed()

    def feed(self) -> None:
        if self.at + self.chunk > self.ids.shape[1]:
            self.at = 0
        self.stream.feed(self.ids[:, self.at : self.at + self.chunk])
        self.at += self.chunk
        synchronize(self.stream.model)


def stages(warm: WarmStream) -> dict[str, Callable[[], object]]:
    """The parts of one chunk's pass that are not linear layers, each for all layers of the model, by name."""
    stream, chunk = warm.stream, warm.chunk
    model, cache, policy = stream.model, stream.cache, stream.policy
    config = model.config.get_text_config()
    layer = cache.slots[0]
    count = cache.layers_count
    shape = (1, config.num_attention_heads, chunk, layer.keys.shape[-1])
    query = torch.randn(shape, dtype=model.dtype, device=model.device)
    layer.used += chunk  # as in the middle of a pass
    queries, keys = rotated(cache, layer, query, query.shape[-1] ** -0.5)
    values = layer.values[:, :, : layer.used].clone()
    layer.used -= chunk
    weights = policy.query_weights(chunk, query.device)
    hidden = torch.randn(chunk, config.hidden_size, dtype=model.dtype, device=model.device)
    targets = torch.zeros(chunk, dtype=torch.int64, device=model.device)

    def rotate() -> None:
        layer.used += chunk
        for _ in range(count):
            rotated(cache, layer, query, 1.0)
        layer.used -= chunk

    def attend(summed: Tensor | None) -> Callable[[], None]:
        def call() -> None:
            for _ in range(count):
                attend_and_sum(queries, keys, values, summed, policy.far, kernel=stream.kernel)

        return call

    def choose() -> None:
        for _ in range(count):
            layer.scores[:, :, : policy.cache].topk(max(policy.hitters, 1)).indices.sort()
            layer.keys[:, :, : policy.cache].clone()

    parts: dict[str, Callable[[], object]] = {
        "rotation": rotate,
        "attention": attend(None),
        "attention with column sums": attend(weights),
        "choosing and compacting": choose,
        "logits and losses": lambda: stream.logits.losses(hidden, targets),
    }
    return {name: _to_the_end(part, model) for name, part in parts.items()}


@torch.inference_mode()
def bench(
    model: PreTrainedModel,
    ids: Tensor,
    caches: Sequence[int] = (512, 1024, 2048),
    policies: Sequence[str] = ("streamh2o", "h2o", "streamingllm"),
    chunk: int = 256,
    rounds: int = 5,
    peers: Contestants | None = None,
    kernel: str | Kernel = "auto",
) -> dict[str, Any]:
    """Time streams, stages and baselines on `ids` [1, n]; n should exceed the largest cache by a few chunks.

    peers: further contestants, which need the model's own attention.

    Returns plain numbers: `runs` (name, tokens_per_second, of_limit: how close to the linear layers alone) and
    `stages` (name, share: of the time the linear layers take); `evict_token` (policy, ratio: how many times faster than
    chunks of one token evicting after every token is in whole chunks, which gives the same losses).
    """
    warm: dict[str, WarmStream] = {}
    contestants: Contestants = {LIMIT: (chunk, linear_layers(model, chunk))}
    piece, now = ids[:, :chunk], clock(model)

    def dense() -> None:
        model(piece, use_cache=False)
        synchronize(model)

    # These need the model's own attention, so they are timed before any stream is attached.
    others = {"dense pass over one chunk": (chunk, dense), **(peers or {})}
    baselines = race({LIMIT: contestants[LIMIT], **others}, rounds, now=now)
    try:
        for cache in caches:
            for policy in policies:
                name = f"{policy}, cache {cache}"
                warm[name] = WarmStream(model, ids, policy, cache, chunk)
                contestants[name] = (chunk, warm[name].feed)
        small = min(caches)
        warm["recompute"] = WarmStream(model, ids, "recompute", small, chunk)
        contestants[f"window of {small} recomputed"] = (chunk, warm["recompute"].feed)
        for policy in policies:
            exact, loop = _evict_token(policy, small), _token_by_token(policy, small)
            warm[exact] = WarmStream(model, ids, policy, small, chunk, evict="token")
            contestants[exact] = (chunk, warm[exact].feed)
            warm[loop] = WarmStream(model, ids, policy, small, chunk)
            warm[loop].chunk = 1  # from here on; filling the cache so would take longer than the benchmark
            contestants[loop] = (LOOP, _calls(warm[loop].feed, LOOP))
        timings = race(contestants, rounds, now=now)
        first = warm[f"{policies[0]}, cache {small}"]
        parts = {name: (chunk, call) for name, call in stages(first).items()}
        staged = race({LIMIT: contestants[LIMIT], **parts}, rounds, now=now)
    finally:
        for each in warm.values():
            each.stream.close()
    runs = [_row(timing, timings[0]) for timing in timings] + [_row(other, baselines[0]) for other in baselines[1:]]
    by_name = {timing.name: timing for timing in timings}
    gains = [
        {
            "policy": policy,
            "ratio": ratio(by_name[_evict_token(policy, small)], by_name[_token_by_token(policy, small)]),
        }
        for policy in policies
    ]
    shares = [{"name": t.name, "share": share(t, staged[0])} for t in staged[1:]]
    return {
        "chunk": chunk,
        "rounds": rounds,
        "small": small,
        "runs": runs,
        "stages": shares,
        "stages_of": f"{policies[0]}, {small}",
        "evict_token": gains,
    }


def _evict_token(policy: str, cache: int) -> str:
    return f"{policy}, cache {cache}, evict token"


def _token_by_token(policy: str, cache: int) -> str:
    return f"{policy}, cache {cache}, chunk 1"


def _calls(call: Callable[[], object], count: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(count):
            call()

    return calls


def _row(timing: Timing, limit: Timing) -> dict[str, Any]:
    return {
        "name": timing.name,
        "tokens_per_second": timing.tokens_per_second,
        "of_limit": ratio(timing, limit),
    }
