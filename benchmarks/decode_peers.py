"""Tokens a second written after 1,024 tokens of text, beside llama.cpp, where llama-cpp-python is installed.

python benchmarks/decode_peers.py [THREADS]
"""

import sys
import time
from statistics import median

import llama_cpp
import torch

from streamh2o import StreamCache, load_model
from streamh2o.models.find import NAMED
from streamh2o.stream.lending import cache_argument

STEPS, ROUNDS, TEXT = 16, 5, 1024


def llama(ids, threads):
    """A call that writes `STEPS` tokens, always after the same text."""
    path = str(NAMED["smollm2-135m"].path())
    model = llama_cpp.Llama(path, n_ctx=TEXT + STEPS, n_threads=threads, n_threads_batch=threads, verbose=False)
    model.eval(ids)

    def write():
        model.n_tokens = TEXT
        for token in ids[:STEPS]:
            model.eval([token])

    return write


def ours(ids, **how):
    model = load_model("smollm2-135m", **how).model
    cache = {cache_argument(model): StreamCache.for_model(model, cache=TEXT, policy="streamh2o")}
    model(torch.tensor([ids]), logits_to_keep=1, **cache)

    def write():
        for token in ids[:STEPS]:
            model(torch.tensor([[token]]), logits_to_keep=1, **cache)

    return write


@torch.inference_mode()
def main():
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    ids = list(range(1000, 1000 + TEXT))
    writers = {"llama.cpp": llama(ids, threads)}
    for weights in ("plain", "packed"):
        writers[f"streamh2o, bfloat16, {weights}"] = ours(ids, dtype="bfloat16", weights=weights)
    taken = {name: [] for name in writers}
    for turn in range(ROUNDS + 1):
        for name, write in writers.items():
            start = time.perf_counter()
            write()
            if turn:
                taken[name].append(time.perf_counter() - start)
    for name, seconds in taken.items():
        print(f"{name:30} {STEPS / median(seconds):6.1f} tokens/s")


main()
