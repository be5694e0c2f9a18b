"""Several streams in one pass of the model: its linear layers take all rows at once, each row has its own slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamh2o.cache.slot_cache import FixedCache, SlotCache, take_appended, tell_appended

if TYPE_CHECKING:
    from streamh2o.stream.chunk_stream import ChunkStream, Fed


class Together(FixedCache):
    """The caches of several streams as the one that a pass of all of them is given; row i of the batch is cache i's."""

    def __init__(self, caches: Sequence[SlotCache]) -> None:
        self.layers = []  # what a cache of transformers is made of; ours are in `caches`
        self.caches = caches
        self.layers_count = caches[0].layers_count
        self.tokens = max(cache.tokens for cache in caches)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to each cache its row of keys and values [batch, kv_heads, n, head_dim]; returned as they came."""
        owners = []
        for cache, key, value in zip(self.caches, key_states.split(1), value_states.split(1), strict=True):
            cache.update(key, value, layer_idx)
            owners += take_appended()
        tell_appended(owners)
        return key_states, value_states


@torch.inference_mode()
def feed_together(streams: Sequence[ChunkStream], ids: Sequence[Tensor], score: bool = True) -> list[Fed]:
    """`ChunkStream.feed` for several streams of one model: `ids[i]` [1, n] are the next tokens of `streams[i]`.

    Streams that have equally many tokens to read share a pass, so that each gets what it would get alone, but for
    rounding. Whether there is room (`ChunkStream.require_room`) and whether the losses are finite is for the caller to
    see.
    """
    ids = [part.to(streams[0].model.device) for part in ids]
    windows = [stream.window(part) for stream, part in zip(streams, ids, strict=True)]
    hidden: dict[int, Tensor] = {}  # by stream, [1, n, hidden_size]
    for length in {window.shape[1] for window in windows}:
        rows = [row for row, window in enumerate(windows) if window.shape[1] == length]
        states = _states([streams[row] for row in rows], torch.cat([windows[row] for row in rows]))
        for row, own in zip(rows, states.split(1), strict=True):
            hidden[row] = own[:, -ids[row].shape[1] :]
    nll = _losses(streams, ids, hidden) if score else [None] * len(streams)
    return [stream.took(hidden[row], nll[row]) for row, stream in enumerate(streams)]


def _states(streams: Sequence[ChunkStream], ids: Tensor) -> Tensor:
    """The hidden states [streams, n, hidden_size] of `ids` [streams, n]."""
    if len(streams) == 1:
        return streams[0].forward(ids, streams[0].cache, streams[0].position_ids(ids))
    positions = torch.cat([stream.position_ids(row) for stream, row in zip(streams, ids.split(1), strict=True)])
    return streams[0].forward(ids, Together([stream.cache for stream in streams]), positions)


def _losses(streams: Sequence[ChunkStream], ids: Sequence[Tensor], hidden: dict[int, Tensor]) -> list[Tensor | None]:
    """The losses [1, scored] of each stream, from one product with the output embedding."""
    pairs = [stream.predictions(part, hidden[row]) for row, (stream, part) in enumerate(zip(streams, ids, strict=True))]
    before = torch.cat([states[0] for states, _ in pairs])
    targets = torch.cat([wanted[0] for _, wanted in pairs])
    nll = streams[0].logits.losses(before, targets)
    return [part[None] for part in nll.split([wanted.shape[1] for _, wanted in pairs])]
