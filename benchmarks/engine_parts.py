"""What each part of the CPU engine is worth: python benchmarks/engine_parts.py [bfloat16|float32] [THREADS] [ROUNDS]

SmolLM2-135M through a full cache of 512 slots, in chunks of 256, 16 and 1 tokens: with the whole engine, with one part
of it left out, and without it. All in one process, in turn; ratios are medians over the rounds. With one thread the
time is the processor's, so that other programs count little.
"""

import statistics
import sys

import torch

from streamh2o import load_model
from streamh2o.runs.bench.race import Contestants, clock, race, share
from streamh2o.runs.bench.stream_speed import WarmStream, random_ids
from streamh2o.stream.engine import fused
from streamh2o.stream.engine.fused import Fused

CACHE, CHUNKS, CALLS = 512, (256, 16, 1), 8
ALL = "the whole engine"


def nothing(*_: object) -> list:
    return []


PARTS = {
    ALL: (),
    "without whole layers": ("_layers",),
    "without weights laid out": ("_linear_layers",),
    "without norms and gates": ("_norms_and_gates",),
    "without the engine": ("_layers", "_linear_layers", "_norms_and_gates"),
}


def without(parts: tuple[str, ...], decoder: torch.nn.Module, kernel: object) -> Fused:
    """The engine of a decoder, made while these functions find nothing."""
    originals = {name: getattr(fused, name) for name in parts}
    try:
        for name in parts:
            setattr(fused, name, nothing)
        return Fused(decoder, kernel)
    finally:
        for name, original in originals.items():
            setattr(fused, name, original)


def main(dtype: str, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    loaded = load_model(dtype=dtype, device="cpu", selftest=False)
    model, ids = loaded.model, random_ids(loaded.model, CACHE + 8 * max(CHUNKS))
    decoder = model.get_decoder()
    warm = WarmStream(model, ids, "streamh2o", CACHE, max(CHUNKS), kernel=loaded.kernel)
    state, _ = fused._made[decoder]
    engines = {name: without(parts, decoder, loaded.kernel) for name, parts in PARTS.items()}

    def feed(name: str, calls: int) -> None:
        fused._made[decoder] = state, engines[name]
        for _ in range(calls):
            warm.feed()

    for chunk in CHUNKS:
        warm.chunk, calls = chunk, CALLS if chunk < 64 else 1
        contestants: Contestants = {n: (chunk * calls, lambda n=n, c=calls: feed(n, c)) for n in PARTS}
        timings = race(contestants, rounds, now=clock(model))
        for timing in timings:
            spent = 1000 * statistics.median(timing.seconds) / calls
            print(
                f"{dtype} chunk {chunk:<4}{timing.name:26}{spent:8.1f} ms  x {share(timing, timings[0]):.3f}",
                flush=True,
            )
    warm.stream.close()


if __name__ == "__main__":
    main((sys.argv[1:2] or ["bfloat16"])[0], int((sys.argv[2:3] or ["1"])[0]), int((sys.argv[3:4] or ["9"])[0]))
