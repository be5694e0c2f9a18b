"""Several streams in one pass of the model: its linear layers take all rows at once, each row has its own slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamh2o.stream.chunk_stream import ChunkResult, ChunkStream


@torch.inference_mode()
def feed_together(streams: Sequence[ChunkStream], ids: Sequence[Tensor], score: bool = True) -> list[ChunkResult]:
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
        states = _run([streams[row] for row in rows], torch.cat([windows[row] for row in rows]))
        for row, own in zip(rows, states.split(1), strict=True):
            hidden[row] = own[:, -ids[row].shape[1] :]
    losses = _losses(streams, ids, hidden) if score else [None] * len(streams)
    return [stream.record(hidden[row], losses[row]) for row, stream in enumerate(streams)]


def _run(streams: Sequence[ChunkStream], ids: Tensor) -> Tensor:
    """One pass of the next `ids` [streams, n], after which each stream evicts: states [streams, n, hidden_size]."""
    first = streams[0]
    positions = torch.cat([stream.position_ids(row) for stream, row in zip(streams, ids.split(1), strict=True)])
    running = first.new_pass([stream.cache for stream in streams], ids)
    hidden = first.run(running, ids, positions)
    running.finish()
    return hidden


def _losses(streams: Sequence[ChunkStream], ids: Sequence[Tensor], hidden: dict[int, Tensor]) -> list[Tensor | None]:
    """The losses [1, scored] of each stream, from one product with the output embedding."""
    pairs = [stream.predictions(part, hidden[row]) for row, (stream, part) in enumerate(zip(streams, ids, strict=True))]
    before = torch.cat([states[0] for states, _ in pairs])
    targets = torch.cat([wanted[0] for _, wanted in pairs])
    nll = streams[0].logits.losses(before, targets)
    return [part[None] for part in nll.split([wanted.shape[1] for _, wanted in pairs])]
