"""One input through the model, a chunk at a time: read, feed, sum."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamh2o.errors import UserError, naming_memory
from streamh2o.machine import peak_rss_bytes, rss_bytes
from streamh2o.policies import Policy
from streamh2o.runs.interrupt import Interrupt, Stopped
from streamh2o.runs.options import RunOptions, open_reader, open_stream
from streamh2o.runs.perplexity import RunningPerplexity
from streamh2o.runs.progress import Progress
from streamh2o.runs.saving.checks import naming_damage, require_sound
from streamh2o.stream.chunk_stream import ChunkResult
from streamh2o.text import Block, Source, TokenReader
from streamh2o.text.replay import Replay
from streamh2o.versions import versions

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

SCHEMA = 1
_RATE_SECONDS = 10.0  # how far back `tokens_per_second` of a log line looks


class PerplexityRun:
    """The perplexity of `source` under `policy`, a chunk at a time.

    Between two chunks `state` gives all that is needed to go on later; `saved` takes it. reader: the text already read,
    in blocks of a chunk, which then need not be tokenised again. Raises UsageError where
    policy, chunk and model do not fit together.
    """

    def __init__(
        self,
        loaded: Loaded,
        source: Source,
        policy: Policy,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
        saved: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None,
        reader: Replay | None = None,
    ) -> None:
        self.loaded, self.source, self.options = loaded, source, options
        self.perplexity = RunningPerplexity(options.window)
        self.stream = open_stream(loaded, policy, options)
        try:
            self._seconds_before = 0.0
            self.reader = reader or self._restore(saved)
        except BaseException:
            self.stream.close()
            raise
        self.complete = False
        self.block: Block | None = None  # the ids of the last chunk, and where in the input they stand
        self._began = time.perf_counter()
        self._ended: float | None = None
        self._recent = deque([(self._began, self.reader.tokens)])  # (time, tokens) after each of the last chunks
        self._mark()
        if saved:  # the reader has yet to read again what that hash is of
            self._reader_state = saved[1]["reader"]
            self._sha256 = self._reader_state["sha256"]

    def _restore(self, saved: tuple[dict[str, torch.Tensor], dict[str, Any]] | None) -> TokenReader:
        """Put stream and sums back to where `saved` left them, and open the reader there."""
        if not saved:
            return open_reader(self.source, self.loaded.tokenizer, self.options)
        tensors, counts = saved
        with naming_damage(self.source.name):
            require_sound(tensors, counts, self.loaded.model.config.get_text_config().hidden_size)
            device = self.loaded.device
            self.stream.load_state({name: tensor.to(device) for name, tensor in tensors.items()}, counts["stream"])
            self.perplexity.load_state(counts["perplexity"])
            self._seconds_before = float(counts["seconds"])
            return open_reader(self.source, self.loaded.tokenizer, self.options, counts["reader"])

    def __enter__(self) -> PerplexityRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.close()
        self.stream.close()

    @property
    def tokens(self) -> int:
        """Read and scored so far, without a BOS."""
        return self._tokens

    @property
    def bytes_read(self) -> int:
        """Of the input, those that the tokens so far cover."""
        return self._bytes

    @property
    def seconds(self) -> float:
        """Reading and computing, without loading the model; of the earlier parts too in a resumed run."""
        return self._seconds_before + (self._ended or time.perf_counter()) - self._began

    def chunks(self, interrupt: Interrupt | None = None) -> Iterator[Progress]:
        """Run to the end, or until `interrupt` asks to stop; yields after every chunk."""
        try:
            while not (interrupt and interrupt.requested):
                block = self.read(interrupt)
                if block is None:
                    return
                with naming_memory(f"{self.source.name}: out of memory after {self._tokens} tokens"):
                    result = self.stream.feed(torch.from_numpy(block.ids)[None], self.options.score)
                yield self.add(block, result)
        except Stopped:
            return
        finally:
            self._ended = time.perf_counter()

    def read(self, interrupt: Interrupt | None = None) -> Block | None:
        """The next chunk's tokens; None at the end of the input, when the run is complete."""
        with interrupt.waiting() if interrupt else nullcontext():
            block = self.reader.read(self.options.chunk)
        if block is None:
            self._mark()
            self._check_length()
            self._check_budget()
            self.complete = True
        return block

    def add(self, block: Block, result: ChunkResult) -> Progress:
        """Add the losses of `block`. Raises UserError where a loss is not a finite number."""
        self.block = block
        losses = result.losses[0].float().cpu().numpy()
        nll = self.perplexity.add(losses)
        self._mark()
        return self._progress(losses, nll)

    def _mark(self) -> None:
        """Remember how far the input has been scored: the reader itself may already be beyond, or cut off in a step."""
        reader = self.reader
        self._tokens, self._bytes, self._words = reader.tokens, reader.bytes_read, reader.words_read
        self._sha256 = reader.sha256
        self._reader_state = reader.state() if isinstance(reader, TokenReader) else None

    def _progress(self, losses: np.ndarray, nll: float) -> Progress:
        now = time.perf_counter()
        self._recent.append((now, self._tokens))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _RATE_SECONDS:
            self._recent.popleft()
        then, tokens = self._recent[0]
        return Progress(
            name=self.source.name,
            token=self._tokens,
            byte=self._bytes,
            nll=nll,
            n=len(losses),
            losses=losses,
            ppl=self.perplexity.ppl,
            ppl_window=self.perplexity.window_ppl,
            window=self.perplexity.window,
            tokens_per_second=(self._tokens - tokens) / max(now - then, 1e-9),
            seconds=self.seconds,
            fraction=self._fraction(),
            rss_bytes=rss_bytes(),
            slots=self.stream.slots,
            budget=self.stream.policy.cache,
            composition=self.stream.composition(),
        )

    def _fraction(self) -> float | None:
        parts = []
        if self.source.size:
            parts.append(self._bytes / self.source.size)
        if self.options.max_tokens:
            parts.append(self._tokens / self.options.max_tokens)
        return min(1.0, max(parts)) if parts else None

    def _check_length(self) -> None:
        """A file cut short while it was read would pass for a shorter one."""
        size = self.source.size
        if size and self.reader.complete and self._bytes < size:
            raise UserError(
                f"{self.source.name}: ended after {self._bytes} bytes, and had {size} when the run began, so it was "
                "changed meanwhile; run it again."
            )

    def _check_budget(self) -> None:
        """A budget that was not kept, or an eviction that never came, would make the number a lie."""
        stream, policy = self.stream, self.stream.policy
        if policy.evicts and (
            stream.max_slots > policy.cache or (stream.tokens > policy.cache and stream.evictions == 0)
        ):
            raise UserError(
                f"{self.source.name}: {stream.tokens} tokens went through a cache of {policy.cache} slots with "
                f"{stream.evictions} evictions and up to {stream.max_slots} slots held, so the budget was not kept; "
                "please report this."
            )

    def result(self) -> dict[str, Any]:
        """What `--json` prints, plain numbers and strings; `complete` says whether the run came to its end.

        `bytes`, `words` and `sha256` are those of the text that was scored: the whole input where `whole` is true.
        """
        stream, policy, sums = self.stream, self.stream.policy, self.perplexity
        seconds = self.seconds
        knobs = {f.name: getattr(policy, f.name) for f in fields(policy)}
        return {
            "schema": SCHEMA,
            "input": {
                "name": self.source.name,
                "bytes": self._bytes,
                "sha256": self._sha256,
                "words": self._words,
                "whole": self.complete and self.reader.complete,
            },
            "model": self.loaded.info(),
            "policy": policy.name,
            **knobs,
            "chunk": self.options.chunk,
            "per_head": self.options.per_head,
            "evict": self.options.evict,
            "kv_bits": self.options.kv_bits,
            **self.options.reading(),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "device": str(self.loaded.device),
            "threads": torch.get_num_threads(),
            "kernel": stream.kernel.name,
            "tokens": self._tokens,
            "scored": sums.scored,
            "bos": self.reader.bos_added,
            "exact_ids": self.reader.exact,
            "nll_sum": sums.nll_sum,
            "nll_mean": sums.nll_mean,
            "ppl": sums.ppl,
            "bits_per_byte": sums.bits_per_byte(self._bytes),
            "ppl_word": sums.ppl_word(self._words),
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds if seconds > 0 else None,
            "peak_rss_bytes": peak_rss_bytes(),
            "kv_bytes": stream.kv_bytes,
            "max_slots": stream.max_slots,
            "evictions": stream.evictions,
            "complete": self.complete,
            "versions": versions(),
        }

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors, and counts that survive JSON, to go on from after the last chunk. Call it between two chunks."""
        tensors, stream = self.stream.state()
        assert self._reader_state is not None, "a replayed text starts anew"
        return tensors, {
            "stream": stream,
            "perplexity": self.perplexity.state(),
            "reader": self._reader_state,
            "seconds": self.seconds,
        }
