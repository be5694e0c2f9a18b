"""`streamh2o.perplexity`: what the command `ppl` does with one text, as a function."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.api.inputs import Input, to_source
from streamh2o.api.model import to_loaded, torch_threads
from streamh2o.api.policy import to_policy
from streamh2o.errors import UserError

if TYPE_CHECKING:
    from streamh2o.api.model import Model
    from streamh2o.policies import Policy


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    ppl: perplexity per token, e to the power of `nll_mean`; ppl_word: per word; bits_per_byte: of the text in UTF-8.
    nll_sum, nll_mean: of the losses, in nats. tokens: read; scored: of them, those with a loss. All that divides by a
    count is None where that is zero. kv_bytes: memory of keys and values. evictions: how often slots were freed.
    result: everything, as `to_dict` gives it.
    """

    ppl: float | None
    ppl_word: float | None
    bits_per_byte: float | None
    nll_sum: float
    nll_mean: float | None
    tokens: int
    scored: int
    seconds: float
    kv_bytes: int
    evictions: int
    result: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, result: dict[str, Any]) -> Perplexity:
        """The same as the dict that `streamh2o ppl --json` prints."""
        named = {each.name: result[each.name] for each in fields(cls) if each.name != "result"}
        return cls(**named, result=result)

    def to_dict(self) -> dict[str, Any]:
        """What `streamh2o ppl --json` prints: plain numbers and strings, every setting among them."""
        return deepcopy(self.result)


class PerplexityFailed(UserError):
    """The run failed after some chunks. partial: of the text before, with `complete` false in its `to_dict`."""

    def __init__(self, message: str, partial: Perplexity) -> None:
        super().__init__(message)
        self.partial = partial


def perplexity(
    input: Input | None = None,
    *,
    text: str | None = None,
    model: Model = "smollm2-135m",
    policy: str | Policy = "streamh2o",
    cache: int = 1024,
    sinks: int | None = None,
    recent: int | None = None,
    hitters: int | None = None,
    chunk: int = 256,
    evict: str = "chunk",
    kv_bits: int = 16,
    per_head: str = "kv",
    max_tokens: int | None = None,
    bos: str = "auto",
    newline: str = "keep",
    errors: str = "strict",
    allow_special: bool = False,
    log: str | os.PathLike[str] | None = None,
    nll_out: str | os.PathLike[str] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    kernel: str = "auto",
    progress: bool = False,
    **knobs: Any,
) -> Perplexity:
    """Read a text of any length with a cache of fixed size, and say how well the model predicts it.

    Memory and speed do not depend on the length of the text. What is evicted is forgotten.

    input, text: one of them. A path, an open file or an iterable of pieces of text; or the text itself.
    model: a name as on the command line, what `load_model` returns, or a pair (model, tokenizer) of transformers.
    policy, cache, sinks, recent, hitters, knobs: what the cache keeps; see `make_policy`. cache counts slots per layer
    and KV head. A policy made by `make_policy` has these numbers already.
    chunk: tokens of one forward pass. evict: after each `chunk`, or after each `token`. kv_bits: 8 or 4 to keep older
    keys and values as integers. per_head: `kv` or `query`, which chooses its own slots.
    max_tokens: read at most so many tokens. bos: `auto`, `yes` or `no`. newline: `keep` or `lf`. errors: `strict` or
    `replace` bytes that are not UTF-8. allow_special: names of special tokens in the text become these tokens.
    log, nll_out: files to write, a JSON line per chunk, and all losses in nats as a NumPy array, float32 [scored].
    dtype, device: for a model given by its name. threads: None leaves those of torch alone. kernel: how attention is
    computed, `auto`, `compiled` or `torch`. progress: show it on stderr.

    Raises UsageError for options that do not fit, UserError for a text that cannot be read; PerplexityFailed, a
    UserError, where that shows after some chunks.

        found = streamh2o.perplexity("book.txt", cache=512)
        print(found.ppl, found.bits_per_byte)
    """
    source = to_source(input, text, "perplexity")
    chosen = to_policy(policy, cache, sinks=sinks, recent=recent, hitters=hitters, **knobs)

    from streamh2o.report.live import make_display
    from streamh2o.runs.in_turn import InTurn
    from streamh2o.runs.options import RunOptions
    from streamh2o.runs.outputs import check_outputs
    from streamh2o.runs.perplexity_run import PerplexityRun
    from streamh2o.runs.run_files import RunFiles
    from streamh2o.runs.score_inputs import score_inputs

    options = RunOptions(
        chunk=chunk,
        max_tokens=max_tokens,
        bos=bos,
        newline=newline,
        errors=errors,
        allow_special=allow_special,
        per_head=per_head,
        evict=evict,
        kv_bits=kv_bits,
    )
    outputs = {name: None if path is None else Path(path) for name, path in (("log", log), ("nll_out", nll_out))}
    check_outputs(outputs, [source.name])
    files = RunFiles([source], outputs["log"], outputs["nll_out"])
    with torch_threads(threads):
        loaded = to_loaded(model, dtype=dtype, device=device, kernel=kernel)
        with files, make_display(quiet=not progress) as display:
            runs = InTurn([source], lambda one, _: PerplexityRun(loaded, one, chosen, options), display)
            scored = score_inputs(runs, files, display)
    if scored.failure is not None and scored.results:
        raise PerplexityFailed(str(scored.failure), Perplexity.of(scored.results[0])) from scored.failure
    if scored.failure is not None:
        raise scored.failure
    return Perplexity.of(scored.results[0])
