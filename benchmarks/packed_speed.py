"""Packed weights against plain ones, in turn: python benchmarks/packed_speed.py BOOK [auto|float32|bfloat16] [torch]

Chunks of 256 tokens through a full cache of 512, and decode steps. Processor time of one thread, since other programs
may be running; medians of interleaved rounds. Then the perplexity of the first 5,000 tokens of the book with both.
"""

import math
import statistics
import sys
import time

import torch

from streamh2o import StreamCache, load_model, make_policy
from streamh2o.kernels.gguf_linear import weight_bytes
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.lending import cache_argument

ROUNDS, STEPS, TOKENS = 9, 12, 5000

torch.set_num_threads(1)
KERNEL = sys.argv[3] if len(sys.argv) > 3 else "auto"
dtype = sys.argv[2] if len(sys.argv) > 2 else "auto"
models = {weights: load_model(dtype=dtype, weights=weights) for weights in ("plain", "packed")}
with open(sys.argv[1], encoding="utf-8") as book:
    ids = models["plain"].tokenizer(book.read(100_000), return_tensors="pt").input_ids[:, :TOKENS]


def timed(calls: dict[str, list[float]], name: str, call, count: int) -> None:
    start = time.process_time()
    for _ in range(count):
        call()
    calls[name].append((time.process_time() - start) / count * 1000)


@torch.inference_mode()
def decode() -> dict[str, list[float]]:
    caches = {}
    for name, loaded in models.items():
        caches[name] = StreamCache.for_model(loaded.model, cache=1024)
        loaded.model(input_ids=ids[:, :1100], logits_to_keep=1, **{cache_argument(loaded.model): caches[name]})
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, loaded in models.items():
            step = {"input_ids": ids[:, :1], "logits_to_keep": 1, cache_argument(loaded.model): caches[name]}
            timed(times, name, lambda loaded=loaded, step=step: loaded.model(**step), STEPS)
    for cache in caches.values():
        cache.detach()
    return times


def read() -> tuple[dict[str, list[float]], dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    streams = {name: ChunkStream(each.model, make_policy("streamh2o", cache=512)) for name, each in models.items()}
    for piece in ids.split(256, dim=1):
        for name, stream in streams.items():
            timed(times, name, lambda n=name, s=stream, p=piece: losses[n].append(s.feed(p).losses[0]), 1)
    for stream in streams.values():
        stream.close()
    return times, {name: math.exp(torch.cat(each).double().mean().item()) for name, each in losses.items()}


steps = {name: statistics.median(each) for name, each in decode().items()}
chunks, perplexity = read()
chunks = {name: statistics.median(each[3:-1]) for name, each in chunks.items()}
print(
    f"{models['plain'].dtype}, {KERNEL} kernel",
    f"{'plain':>12}{'packed':>12}{'ratio':>8}",
    sep="\n" + 24 * " ",
)
for what, each in (
    ("weights, MB", {name: weight_bytes(one.model) / 1e6 for name, one in models.items()}),
    ("ms a chunk of 256", chunks),
    ("ms a decode step", steps),
    (f"perplexity, {TOKENS:,}", perplexity),
):
    print(f"{what:<24}{each['plain']:>12.4f}{each['packed']:>12.4f}{each['packed'] / each['plain']:>8.4f}")
