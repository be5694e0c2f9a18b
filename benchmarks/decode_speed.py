"""A decode step with the cache that grows and with StreamCache, in turn.

    python benchmarks/decode_speed.py float32 torch

Processor time of one thread, since other programs may be running; medians of interleaved rounds.
"""

import statistics
import sys
import time

import torch
from transformers import DynamicCache

from streamh2o import StreamCache, load_model
from streamh2o.stream.lending import cache_argument

ROUNDS, STEPS = 9, 12

torch.set_num_threads(1)
KERNEL = sys.argv[2] if len(sys.argv) > 2 else "auto"
loaded = load_model("smollm2-135m", dtype=sys.argv[1] if len(sys.argv) > 1 else "auto")
model, config = loaded.model, loaded.model.config
name, heads = cache_argument(model), config.num_key_value_heads
ids = torch.arange(1100)[None] + 1000


def grown(length: int) -> DynamicCache:
    """The cache of transformers after `length` tokens; what they were does not matter for speed."""
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, 1, heads, length, config.hidden_size // config.num_attention_heads)
        cache.update(keys.to(model.dtype), values.to(model.dtype), layer)
    return cache


def fixed(length: int, policy: str) -> StreamCache:
    cache = StreamCache.for_model(model, cache=1024, policy=policy)
    model(input_ids=ids[:, :length], logits_to_keep=1, **{name: cache})
    return cache


with torch.inference_mode():
    caches = {
        "transformers, 1,000 tokens": grown(1000),
        "transformers, 8,000 tokens": grown(8000),
        "streamh2o, 1,000 tokens": fixed(1000, "streamh2o"),
        "streamh2o, cache of 1,024 full": fixed(1100, "streamh2o"),
        "streamingllm, cache of 1,024 full": fixed(1100, "streamingllm"),
    }
    times: dict[str, list[float]] = {what: [] for what in caches}
    for _ in range(ROUNDS):
        for what, cache in caches.items():
            start = time.process_time()
            for _ in range(STEPS):
                model(input_ids=ids[:, :1], logits_to_keep=1, **{name: cache})
            times[what].append((time.process_time() - start) / STEPS)
first = statistics.median(times["transformers, 1,000 tokens"])
for what, each in times.items():
    print(f"{what:<36}{statistics.median(each) * 1000:7.1f} ms {first / statistics.median(each):6.2f}")
