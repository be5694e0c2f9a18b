"""One input scored as another tool defines it: windows through the model's own attention, without a streaming cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamh2o.errors import UserError
from streamh2o.machine import peak_rss_bytes, rss_bytes
from streamh2o.runs.interrupt import Interrupt, Stopped
from streamh2o.runs.options import RunOptions, open_reader
from streamh2o.runs.perplexity import RunningPerplexity, exp
from streamh2o.runs.perplexity_run import SCHEMA
from streamh2o.runs.progress import Progress
from streamh2o.runs.windowed import Definition
from streamh2o.runs.windowed.base import Ids, Window
from streamh2o.stream.lm_head import LmHead
from streamh2o.text import Source
from streamh2o.versions import versions

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded


class WindowedRun:
    """The perplexity of `source` as `definition` has it, a window at a time.

    nll_sum and count: what the tool sums, weighted as it weighs, and what it divides by.
    """

    def __init__(self, loaded: Loaded, source: Source, definition: Definition, options: RunOptions) -> None:
        self.loaded, self.source, self.definition = loaded, source, definition
        self.reader = open_reader(source, loaded.tokenizer, options)
        self.perplexity = RunningPerplexity(options.window)  # unweighted: what displays show
        self.nll_sum, self.count, self.windows = 0.0, 0, 0
        self.complete = False
        self._options = options
        self._decoder: Any = loaded.model.get_decoder()
        self._head = LmHead(loaded.model, loaded.kernel)
        self._began, self._ended = time.perf_counter(), 0.0

    def __enter__(self) -> WindowedRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.close()

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._began

    def chunks(self, interrupt: Interrupt | None = None) -> Iterator[Progress]:
        """Run to the end, or until `interrupt` asks to stop; yields after every window."""
        try:
            for window in self.definition.windows(Ids(lambda size: self._read(size, interrupt))):
                found = self._losses(window)
                total = self.perplexity.add(found)
                self.nll_sum += total * window.weight
                self.count += window.divisor
                self.windows += 1
                yield self._progress(found, total)
                if interrupt and interrupt.requested:
                    return
            self.complete = True
        except Stopped:
            return
        except UserError as error:
            raise UserError(f"{self.source.name}: {error}") if self.windows == 0 else error from None
        finally:
            self._ended = time.perf_counter()

    def _read(self, size: int, interrupt: Interrupt | None) -> np.ndarray | None:
        if interrupt is None:
            block = self.reader.read(size)
        else:
            with interrupt.waiting():
                block = self.reader.read(size)
        return None if block is None else block.ids

    @torch.inference_mode()
    def _losses(self, window: Window) -> np.ndarray:
        ids = torch.from_numpy(window.ids)[None].to(self.loaded.model.device)
        hidden = self._decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0, -window.scored :]
        return self._head.losses(hidden, ids[0, -window.scored :]).cpu().numpy()

    def _progress(self, found: np.ndarray, total: float) -> Progress:
        reader, context, seconds = self.reader, self.definition.context, self.seconds
        return Progress(
            name=self.source.name,
            token=reader.tokens,
            byte=reader.bytes_read,
            nll=total,
            n=len(found),
            losses=found,
            ppl=self.perplexity.ppl,
            ppl_window=self.perplexity.window_ppl,
            window=self.perplexity.window,
            tokens_per_second=reader.tokens / max(seconds, 1e-9),
            seconds=seconds,
            fraction=self._fraction(),
            rss_bytes=rss_bytes(),
            slots=context,
            budget=context,
            composition={},
        )

    def _fraction(self) -> float | None:
        limit = self._options.max_tokens
        most = self.reader.tokens / limit if limit else 0.0
        size = self.source.size
        return min(1.0, max(most, self.reader.bytes_read / size)) if size else most or None

    def result(self) -> dict[str, Any]:
        """What `--json` prints. `ppl` is the tool's number per token; `ppl_word`, `ppl_byte` and `bits_per_byte` are
        None where the tool does not score every token once.
        """
        reader, definition, sums = self.reader, self.definition, self.perplexity
        mean = self.nll_sum / self.count if self.count else None
        whole = definition.per_word_and_byte and sums.scored > 0
        words, size = reader.split_words, reader.bytes_read
        return {
            "schema": SCHEMA,
            "input": {
                "name": self.source.name,
                "bytes": size,
                "sha256": reader.sha256,
                "words": words,
                "whole": self.complete and reader.complete,
            },
            "model": self.loaded.info(),
            "definition": definition.name,
            "context": definition.context,
            "stride": getattr(definition, "stride", None),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "device": str(self.loaded.device),
            "threads": torch.get_num_threads(),
            **self._options.reading(),
            "tokens": reader.tokens,
            "windows": self.windows,
            "losses": sums.scored,
            "scored": self.count,
            "bos": reader.bos_added,
            "exact_ids": reader.exact,
            "nll_sum": self.nll_sum,
            "nll_mean": mean,
            "ppl": exp(mean),
            "bits_per_byte": sums.bits_per_byte(size) if whole else None,
            "ppl_byte": exp(self.nll_sum / size) if whole and size else None,
            "ppl_word": sums.ppl_word(words) if whole else None,
            "seconds": self.seconds,
            "tokens_per_second": reader.tokens / self.seconds if self.seconds > 0 else None,
            "peak_rss_bytes": peak_rss_bytes(),
            "complete": self.complete,
            "versions": versions(),
        }
