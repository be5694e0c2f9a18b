"""A model's linear layers in bfloat16 and as torchao's int8, in turn: python benchmarks/int8_speed.py [graph|layers]

torchao is no dependency: pip install torchao. Processor time of one thread, least of the rounds, milliseconds for the
linear layers of the first ten blocks. Through torch.compile, which torchao is made for: graph, all layers in one, or
layers, one by one, as a model with parts that cannot be compiled would have them. laid out: as a stream has the plain
ones.
"""

import sys
import time
from functools import partial

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from streamh2o import load_model
from streamh2o.kernels.gguf_linear import GgufLinear
from streamh2o.stream.engine.fused import _Linear

ROUNDS = 7

how = sys.argv[1] if len(sys.argv) > 1 else ""
torch._dynamo.config.recompile_limit = 64
torch.set_num_threads(1)
ways = {
    "plain": (load_model(dtype="bfloat16"), None),
    "int8, weights only": (load_model(dtype="bfloat16"), Int8WeightOnlyConfig()),
    "int8, dynamic": (load_model(dtype="bfloat16"), Int8DynamicActivationInt8WeightConfig()),
    "packed": (load_model(dtype="bfloat16", weights="packed"), None),
}
layers = {}
for name, (loaded, config) in ways.items():
    decoder = loaded.model.model
    if config is not None:
        quantize_(decoder, config)
    found = [module for module in decoder.layers[:10].modules() if isinstance(module, nn.Linear | GgufLinear)]
    widths = [layer.in_features for layer in found]

    def multiply(inputs: dict[int, torch.Tensor], found=found, widths=widths) -> list[torch.Tensor]:
        return [layer(inputs[width]) for layer, width in zip(found, widths, strict=True)]

    if how == "layers" and name != "packed":
        found = [torch.compile(layer, fullgraph=True, dynamic=False) for layer in found]
        layers[name] = partial(multiply, found=found)
    else:
        compiled = how == "graph" and name != "packed"
        layers[name] = torch.compile(multiply, fullgraph=True, dynamic=False) if compiled else multiply
    if name == "plain":
        layers["laid out"] = partial(
            multiply, found=[_Linear(layer) for layer in decoder.layers[:10].modules() if isinstance(layer, nn.Linear)]
        )
print(f"{'rows':>5}", *(f"{name:>20}" for name in layers))
with torch.inference_mode():
    for rows in (1, 256):
        inputs = {width: torch.randn(1, rows, width).bfloat16() for width in (576, 1536)}
        least = dict.fromkeys(layers, float("inf"))
        for turn in range(ROUNDS + 1):
            for name, each in layers.items():
                start = time.process_time()
                each(inputs)
                if turn:
                    least[name] = min(least[name], time.process_time() - start)
        print(f"{rows:>5}", *(f"{seconds * 1000:>17.1f} ms" for seconds in least.values()), flush=True)
