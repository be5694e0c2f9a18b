"""Several inputs through the model side by side, each with a cache of its own: what `streamh2o ppl --batch` runs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from streamh2o.errors import UserError, naming_memory
from streamh2o.policies import Policy
from streamh2o.runs.interrupt import Interrupt, Stopped
from streamh2o.runs.notes import note_end, note_start
from streamh2o.runs.options import RunOptions, open_stream
from streamh2o.runs.perplexity import exp
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Display, Progress
from streamh2o.stream.batched import feed_together
from streamh2o.stream.chunk_stream import ChunkResult
from streamh2o.text import Block, Source

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded


class BatchRun:
    """The perplexity of each of `sources` under `policy`, up to `size` of them in one pass; one that ends makes room.

    results: by the number of the source, as of `PerplexityRun.result`, of those that have ended or were cut short;
    their `seconds` are shared with their neighbours. latest: by number, where each source stood last. Raises UserError
    where `size` caches need more memory than is free.
    """

    def __init__(
        self,
        loaded: Loaded,
        sources: Sequence[Source],
        policy: Policy,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
        size: int = 4,
        display: Display = Display(),  # noqa: B008 (holds nothing)
    ) -> None:
        self.loaded, self.sources, self.policy, self.options, self.size = loaded, sources, policy, options, size
        self.results: dict[int, dict[str, Any]] = {}
        self.latest: dict[int, Progress] = {}
        self._display = display
        self._waiting = deque(range(len(sources)))
        self._running: dict[int, PerplexityRun] = {}
        self._began = time.perf_counter()
        open_stream(loaded, policy, options, batch=min(size, len(sources))).close()

    def chunks(self, interrupt: Interrupt | None = None) -> Generator[tuple[int, Progress], None, None]:
        """Run to the end, or until `interrupt` asks to stop; yields the number of a source after each of its chunks.

        Where one source fails, with UserError, all stop, and what was finished of each is in `results`.
        """
        self._display.begin(f"{len(self.sources)} inputs, {self.size} at a time")
        try:
            while not (interrupt and interrupt.requested):
                blocks = self._read(interrupt)
                if not blocks:
                    return
                for number, result in zip(blocks, self._feed(blocks), strict=True):
                    run = self._running[number]
                    with _naming(run):
                        self.latest[number] = run.add(blocks[number], result)
                    yield number, self.latest[number]
        except Stopped:
            return
        finally:
            for number in sorted(self._running):
                self._end(number)

    def _read(self, interrupt: Interrupt | None) -> dict[int, Block]:
        """The next chunk of up to `size` sources; those that have ended make room for the next ones."""
        blocks: dict[int, Block] = {}
        while len(blocks) < self.size:
            unread = [number for number in self._running if number not in blocks]
            if not unread and not self._waiting:
                break
            number = unread[0] if unread else self._begin(self._waiting.popleft())
            block = self._running[number].read(interrupt)
            if block is None:
                self._end(number)
            else:
                blocks[number] = block
        return blocks

    def _begin(self, number: int) -> int:
        self._running[number] = run = PerplexityRun(self.loaded, self.sources[number], self.policy, self.options)
        note_start(self._display, run.source, run.reader)
        return number

    def _end(self, number: int) -> None:
        run = self._running.pop(number)
        run.__exit__()
        if run.complete or run.perplexity.scored:
            self.results[number] = {**run.result(), "batch": self.size}
            note_end(self._display, run.source, self.results[number])

    def _feed(self, blocks: dict[int, Block]) -> list[ChunkResult]:
        runs = [self._running[number] for number in blocks]
        ids = [torch.from_numpy(block.ids)[None] for block in blocks.values()]
        for run, part in zip(runs, ids, strict=True):
            with _naming(run):
                run.stream.require_room(part)
        with naming_memory(f"Out of memory with {len(runs)} inputs at a time; use a smaller --batch"):
            return feed_together([run.stream for run in runs], ids, self.options.score)

    def progress(self) -> Progress:
        """All inputs as one, for a display: sums over all, and the cache of the one that holds most."""
        running = [self.latest[number] for number in self._running if number in self.latest]
        sums = [(result["nll_sum"], result["scored"]) for result in self.results.values()]
        sums += [(run.perplexity.nll_sum, run.perplexity.scored) for run in self._running.values()]
        nll, scored = (sum(column) for column in zip(*sums, strict=True))
        windows = [math.log(part.ppl_window) for part in running if part.ppl_window]
        return replace(
            max(running, key=lambda part: part.slots),
            name=f"{len(self.sources)} inputs",
            token=sum(part.token for part in self.latest.values()),
            byte=sum(part.byte for part in self.latest.values()),
            ppl=exp(nll / scored) if scored else None,
            ppl_window=exp(sum(windows) / len(windows)) if windows else None,
            tokens_per_second=sum(part.tokens_per_second for part in running),
            seconds=time.perf_counter() - self._began,
            fraction=self._fraction(),
        )

    def _fraction(self) -> float | None:
        """Of the bytes of all inputs; None where a size is unknown."""
        sizes = [source.size for source in self.sources if source.size is not None]
        if len(sizes) < len(self.sources) or not sum(sizes):
            return None
        return sum(sizes[number] * (part.fraction or 0) for number, part in self.latest.items()) / sum(sizes)


@contextmanager
def _naming(run: PerplexityRun) -> Iterator[None]:
    """Put the name of the run's input before what a UserError says."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{run.source.name}: {error}") from error
