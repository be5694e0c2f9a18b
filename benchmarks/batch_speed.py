"""Four texts side by side and one after another, in turn, for several chunks: python benchmarks/batch_speed.py float32

Processor time of one thread, since other programs may be running; medians of the rounds' ratios.
"""

import statistics
import sys
import time

import torch

from streamh2o import load_model, make_policy
from streamh2o.stream.batched import feed_together
from streamh2o.stream.chunk_stream import ChunkStream

TEXTS, CACHE, ROUNDS, TOKENS = 4, 256, 3, 8  # TOKENS of each text a round, or one chunk where that is more

torch.set_num_threads(1)
model = load_model("smollm2-135m", dtype=sys.argv[1] if len(sys.argv) > 1 else "auto").model


def full() -> list[ChunkStream]:
    """Streams whose caches are full."""
    streams = [ChunkStream(model, make_policy("streamh2o", CACHE), chunk=256) for _ in range(TEXTS)]
    for number, stream in enumerate(streams):
        for ids in torch.randint(0, 40_000, (2, 1, 256), generator=torch.Generator().manual_seed(number)):
            stream.feed(ids)
    return streams


def taken(streams: list[ChunkStream], ids: torch.Tensor, together: bool) -> float:
    """Seconds of the processor for `ids` [TEXTS, n]."""
    rows = ids.split(1)
    start = time.process_time()
    if together:
        feed_together(streams, rows)
    else:
        for stream, row in zip(streams, rows, strict=True):
            stream.feed(row)
    return time.process_time() - start


print(f"{'chunk':>5}  {'one by one':>10}  {'together':>10}  times as fast")
for chunk in (1, 4, 16, 64, 256):
    streams = full()
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        pieces = torch.randint(0, 40_000, (max(1, TOKENS // chunk), TEXTS, chunk))
        for together in (False, True):
            times[together].append(sum(taken(streams, ids, together) for ids in pieces) / pieces.numel())
    alone, beside = (statistics.median(each) * 1000 for each in times)
    gain = statistics.median(a / b for a, b in zip(*times, strict=True))
    print(f"{chunk:>5}  {alone:>7.2f} ms  {beside:>7.2f} ms  {gain:.2f}", flush=True)
    for stream in streams:
        stream.close()
