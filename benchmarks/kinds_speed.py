"""Products with each kind of GGUF blocks against plain ones, in turn: python benchmarks/kinds_speed.py [ROWS ...]

x [rows, 2048] times 12 random matrices [2048, 2048], one after another. Processor time of one thread a product, since
other programs may be running; least of 15 rounds.
"""

import sys
import time

import torch
from torch.nn.functional import linear

from streamh2o.kernels import compiled
from streamh2o.kernels.gguf_blocks import KINDS
from streamh2o.kernels.select import select

SIZE, MATRICES, ROUNDS = 2048, 12, 15

torch.set_num_threads(1)
select("compiled", tell=print)
generator = torch.Generator().manual_seed(0)
packed = {
    name: [kind.random(SIZE, SIZE // kind.weights, generator, scale=1e-3) for _ in range(MATRICES)]
    for name, kind in KINDS.items()
}


@torch.inference_mode()
def products(rows: int, dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(rows, SIZE, generator=generator).to(dtype)
    plain = torch.randn(MATRICES, SIZE, SIZE, generator=generator).to(dtype)
    calls = {"plain": [lambda weight=weight: linear(x, weight) for weight in plain]}
    for name, matrices in packed.items():
        number = KINDS[name].number
        calls[name] = [lambda b=blocks, n=number: compiled.packed_linear(x, b, n, None) for blocks in matrices]
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, each in calls.items():
            start = time.process_time()
            for call in each:
                call()
            least[name] = min(least[name], (time.process_time() - start) / MATRICES * 1000)
    return least


for rows in [int(word) for word in sys.argv[1:]] or [1]:
    columns = {dtype: products(rows, dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(f"{f'rows: {rows}':<9}{'float32':>10}{'bfloat16':>10}{'bytes a weight':>17}")
    for name in columns[torch.float32]:
        size = f"{KINDS[name].size / KINDS[name].weights:.2f}" if name in KINDS else "4 or 2"
        print(f"{name:<9}", *(f"{each[name]:7.2f} ms" for each in columns.values()), f"{size:>17}", sep="")
