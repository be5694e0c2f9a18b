"""Speed as ratios within one process: the stream against the matrix products that no stream can do without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamh2o.cache.positions import rotated
from streamh2o.kernels.attention import attend_and_sum
from streamh2o.kernels.gguf_linear import GgufLinear
from streamh2o.kernels.select import Kernel
from streamh2o.policies import make_policy
from streamh2o.runs.bench.race import Contestants, Timing, clock, race, ratio, share, synchronize
from streamh2o.stream.chunk_stream import ChunkStream

LIMIT = "linear layers alone"
LOOP = 16  # tokens a round where each is a pass of its own


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
        engine: bool = True,
    ) -> None:
        self.stream = ChunkStream(
            model, make_policy(policy, cache), chunk=chunk, evict=evict, kernel=kernel, engine=engine
        )
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
    chunks of one token evicting after every token is in whole chunks, which gives the same losses); `engine` (ratio:
    how many times faster the first policy is with the CPU engine than without it).
    """
    limit: Contestants = {LIMIT: (chunk, linear_layers(model, chunk))}
    small, now = min(caches), clock(model)

    def dense() -> None:
        model(ids[:, :chunk], use_cache=False)
        synchronize(model)

    # These need the model's own attention, so they are timed before there is any stream.
    baselines = race({**limit, "dense pass over one chunk": (chunk, dense), **(peers or {})}, rounds, now=now)
    streams = _Streams(model, ids, chunk, kernel)
    try:
        for cache in caches:
            for policy in policies:
                streams.add(f"{policy}, cache {cache}", policy, cache)
        streams.add(f"window of {small} recomputed", "recompute", small)
        streams.add(_without_engine(policies[0], small), policies[0], small, engine=False)
        for policy in policies:
            streams.add(_evict_token(policy, small), policy, small, evict="token")
            streams.add_token_by_token(_token_by_token(policy, small), policy, small)
        timings = race({**limit, **streams.contestants}, rounds, now=now)
        first = f"{policies[0]}, cache {small}"
        parts = {name: (chunk, call) for name, call in stages(streams.warm[first]).items()}
        staged = race({**limit, **parts}, rounds, now=now)
    finally:
        streams.close()
    named = {timing.name: timing for timing in timings}
    gains = {
        policy: ratio(named[_evict_token(policy, small)], named[_token_by_token(policy, small)]) for policy in policies
    }
    return {
        "chunk": chunk,
        "rounds": rounds,
        "small": small,
        "runs": [_row(each, timings[0]) for each in timings] + [_row(each, baselines[0]) for each in baselines[1:]],
        "stages": [{"name": each.name, "share": share(each, staged[0])} for each in staged[1:]],
        "stages_of": f"{policies[0]}, {small}",
        "evict_token": [{"policy": policy, "ratio": gain} for policy, gain in gains.items()],
        "engine": {"of": first, "ratio": ratio(named[first], named[_without_engine(policies[0], small)])},
    }


class _Streams:
    """Warm streams of one model, and each as a contestant."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, chunk: int, kernel: str | Kernel) -> None:
        self._model, self._ids, self._chunk, self._kernel = model, ids, chunk, kernel
        self.warm: dict[str, WarmStream] = {}
        self.contestants: Contestants = {}

    def add(self, name: str, policy: str, cache: int, evict: str = "chunk", engine: bool = True) -> None:
        """A call reads one chunk."""
        self.warm[name] = WarmStream(
            self._model, self._ids, policy, cache, self._chunk, evict, kernel=self._kernel, engine=engine
        )
        self.contestants[name] = self._chunk, self.warm[name].feed

    def add_token_by_token(self, name: str, policy: str, cache: int) -> None:
        """A call reads `LOOP` chunks of one token."""
        self.add(name, policy, cache)
        feed = self.warm[name].feed
        self.warm[name].chunk = 1  # from here on: to fill the cache so would take longer than the benchmark
        self.contestants[name] = LOOP, lambda: [feed() for _ in range(LOOP)]

    def close(self) -> None:
        for warm in self.warm.values():
            warm.stream.close()


def _without_engine(policy: str, cache: int) -> str:
    return f"{policy}, cache {cache}, without the engine"


def _evict_token(policy: str, cache: int) -> str:
    return f"{policy}, cache {cache}, evict token"


def _token_by_token(policy: str, cache: int) -> str:
    return f"{policy}, cache {cache}, chunk 1"


def _row(timing: Timing, limit: Timing) -> dict[str, Any]:
    return {
        "name": timing.name,
        "tokens_per_second": timing.tokens_per_second,
        "of_limit": ratio(timing, limit),
    }
