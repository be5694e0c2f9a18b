"""How much faster bfloat16 is than float32 on this processor: python benchmarks/dtype_ratio.py [MODEL.gguf]

The rows of `streamh2o/models/device.py` come from here. For plain and for packed weights: chunks of 256 tokens through
a full cache of 512 slots, and decode steps. Processor time of one thread, so that other programs count little; ratios
are medians of rounds in turn. ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 measures a processor with AMX as if it had none.
"""

import statistics
import sys
import time

import torch

from streamh2o import StreamCache, load_model
from streamh2o.models.loaded import Loaded
from streamh2o.runs.bench.stream_speed import WarmStream
from streamh2o.stream.chunk_stream import cache_argument

ROUNDS, STEPS, CHUNK, CACHE = 9, 12, 256, 512
DTYPES = ("float32", "bfloat16")


def ratio(calls: dict[str, object]) -> tuple[float, dict[str, float]]:
    """float32's time in times of bfloat16's, and the median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(1000 * (time.process_time() - start))
    pairs = zip(times["float32"], times["bfloat16"], strict=True)
    return statistics.median(a / b for a, b in pairs), {n: statistics.median(each) for n, each in times.items()}


def reading(models: dict[str, Loaded], ids: torch.Tensor) -> tuple[float, dict[str, float]]:
    streams = {name: WarmStream(one.model, ids, "streamh2o", CACHE, CHUNK) for name, one in models.items()}
    found = ratio({name: stream.feed for name, stream in streams.items()})
    for stream in streams.values():
        stream.stream.close()
    return found


def decoding(models: dict[str, Loaded], ids: torch.Tensor) -> tuple[float, dict[str, float]]:
    caches = {name: StreamCache.for_model(one.model, cache=CACHE) for name, one in models.items()}
    for name, one in models.items():
        one.model(input_ids=ids[:, : CACHE + CHUNK], logits_to_keep=1, **{cache_argument(one.model): caches[name]})

    def steps(name: str) -> object:
        model = models[name].model
        step = {"input_ids": ids[:, :1], "logits_to_keep": 1, cache_argument(model): caches[name]}
        return lambda: [model(**step) for _ in range(STEPS)]

    found = ratio({name: steps(name) for name in models})
    for cache in caches.values():
        cache.detach()
    return found


@torch.inference_mode()
def main(name: str) -> None:
    torch.set_num_threads(1)
    for weights in ("plain", "packed"):
        models = {dtype: load_model(name, dtype, "cpu", weights=weights, selftest=False) for dtype in DTYPES}
        vocabulary = models["float32"].model.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (1, CACHE + 8 * CHUNK), generator=torch.Generator().manual_seed(0))
        for what, measure in (("reading", reading), ("decoding", decoding)):
            times, each = measure(models, ids)
            shown = ", ".join(f"{dtype} {milliseconds:.0f} ms" for dtype, milliseconds in each.items())
            print(f"{weights:<8}{what:<10}bfloat16 is {times:.2f} times as fast ({shown})")


main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
