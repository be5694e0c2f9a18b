"""`--chunk auto`: which chunk this model, this cache and this machine are fastest with."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamh2o.policies import Policy
from streamh2o.runs.options import RunOptions, open_stream
from streamh2o.stream.chunk_stream import ChunkStream

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

CHUNKS = (64, 128, 256, 512, 1024)
_ROUNDS = 3


def fastest_chunk(loaded: Loaded, policy: Policy, options: RunOptions) -> int:
    """The one of `CHUNKS` that reads most tokens per second once the cache is full, by a trial of a few seconds.

    options: all but the chunk; the trial leaves `kv_bits` out. Only chunks that fit the model's positions are tried. If
    there is one of them, it is taken without a trial; if there is none, the largest that fits is.
    """
    room = loaded.trained_positions - policy.cache if policy.evicts else loaded.trained_positions // (_ROUNDS + 1)
    fitting = [chunk for chunk in CHUNKS if chunk <= room]
    if len(fitting) < 2:
        return fitting[0] if fitting else max(1, room)
    rates: dict[int, float] = {}
    for chunk in fitting:
        with open_stream(loaded, policy, replace(options, chunk=chunk, kv_bits=16)) as stream:
            rates[chunk] = _rate(loaded.model, stream, chunk)
        if rates[chunk] < 0.8 * max(rates.values()):
            break  # larger ones are slower still
    return max(rates, key=lambda chunk: rates[chunk])


def _rate(model: PreTrainedModel, stream: ChunkStream, chunk: int) -> float:
    """Tokens per second of `stream`: the fastest of a few chunks of random tokens after a full cache."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, chunk), generator=generator)
    stream.feed(ids)
    if stream.policy.evicts:
        _fill(stream)
    best = 0.0
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        float(stream.feed(ids).losses.sum())  # the sum waits for a GPU
        best = max(best, chunk / (time.perf_counter() - start))
    return best


def _fill(stream: ChunkStream) -> None:
    """Fill the cache with copies of its slots; what they hold does not matter for speed."""
    tensors, counts = stream.state()
    size = stream.policy.cache

    def full(tensor: Tensor) -> Tensor:
        times = -(-size // tensor.shape[2])
        return tensor.repeat(1, 1, times, *[1] * (tensor.dim() - 3))[:, :, :size]

    filled = {name: full(tensor) if name.startswith("layer") else tensor for name, tensor in tensors.items()}
    order = torch.arange(size)
    for name, tensor in filled.items():
        if name.endswith("source_index"):
            filled[name] = order.to(tensor.device).expand_as(tensor).clone()
    stream.load_state(filled, {**counts, "tokens": size, "cache_tokens": size, "max_slots": size})
