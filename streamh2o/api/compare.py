"""`streamh2o.compare`: what the command `compare` does, as a function."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.api.inputs import Input, to_sources
from streamh2o.api.model import to_loaded, torch_threads
from streamh2o.errors import UsageError

if TYPE_CHECKING:
    from streamh2o.api.model import Model


@dataclass(frozen=True)
class Comparison:
    """Several policies and cache sizes on the same tokens. Printed, it is the table of the command.

    rows: a flat dict for each input, policy and cache: `ppl` and, in percent, its `change` against StreamingLLM's on
    the same tokens at the same cache (`change_error`: its standard error), `tokens_per_second`, `kv_bytes`, ... means:
    over several inputs, for each policy and cache. result: everything, as `to_dict` gives it.
    """

    rows: list[dict[str, Any]] = field(repr=False)
    means: list[dict[str, Any]] = field(repr=False)
    result: dict[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """What `streamh2o compare --json` prints."""
        return deepcopy(self.result)

    def __str__(self) -> str:
        from streamh2o.report.comparison_tables import render_comparison
        from streamh2o.terminal import as_text

        return as_text(render_comparison(self.rows))


def compare(
    inputs: Input | Iterable[Input],
    *,
    policies: Sequence[str] = ("streamh2o", "h2o", "streamingllm"),
    caches: Sequence[int] = (256, 512, 1024),
    sinks: int | None = None,
    against_full: bool = False,
    start: int = 0,
    out: str | os.PathLike[str] | None = None,
    model: Model = "smollm2-135m",
    chunk: int = 256,
    evict: str = "chunk",
    kv_bits: int = 16,
    per_head: str = "kv",
    max_tokens: int | None = None,
    bos: str = "auto",
    newline: str = "keep",
    errors: str = "strict",
    allow_special: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    kernel: str = "auto",
    progress: bool = False,
) -> Comparison:
    """Run several policies and cache sizes on the same tokens.

    inputs: one or several paths (patterns too), open files or iterables of pieces of text. Their tokens are held in
    memory.
    policies: names, with knobs after colons: `h2o:recent=64:decay=0.9`. caches: slots per layer and KV head. sinks: for
    the policies that keep some. against_full: also the model with all of the text before each token, where it fits.
    start: count losses from this token of each text on; the tokens before it only fill the cache.
    out: a folder for finished cells, one for each input, policy and cache; another call takes them from there.
    model: a name as on the command line, what `load_model` returns, or a pair (model, tokenizer) of transformers.
    chunk: tokens of one forward pass. evict: after each `chunk`, or after each `token`. kv_bits: 8 or 4 to keep older
    keys and values as integers. per_head: `kv` or `query`, which chooses its own slots.
    max_tokens: read at most so many tokens of each. bos: `auto`, `yes` or `no`. newline: `keep` or `lf`. errors:
    `strict` or `replace` bytes that are not UTF-8. allow_special: names of special tokens in the text become these.
    dtype, device: for a model given by its name. threads: None leaves those of torch alone. kernel: how attention is
    computed, `auto`, `compiled` or `torch`. progress: show it on stderr.

    Raises UsageError for options that do not fit, UserError for a text that cannot be read or a cell that fails; the
    cells before it are in `out`.

        found = streamh2o.compare(["book.txt", "letters.txt"], caches=[512])
        print(found)
    """
    from streamh2o.runs.compare import make_columns

    if isinstance(policies, str) or not policies:
        raise UsageError("policies is a list of names, such as ['streamh2o', 'h2o'].")
    if isinstance(caches, int) or not caches:
        raise UsageError("caches is a list of numbers of slots, such as [256, 512].")
    if out is not None and not os.fspath(out).strip():
        raise UsageError("out names no folder; write '.' for this one.")
    sources = to_sources(inputs)
    if not sources:
        raise UsageError("compare takes at least one input.")
    columns = make_columns([name for name in policies if name != "full"], sorted(set(caches)), sinks)

    from streamh2o.report.comparison import document, means, rows
    from streamh2o.report.live import make_display
    from streamh2o.runs.compare import compare_inputs
    from streamh2o.runs.options import RunOptions

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
    with torch_threads(threads):
        loaded = to_loaded(model, dtype=dtype, device=device, kernel=kernel)
        with make_display(quiet=not progress) as display:
            compared = compare_inputs(
                loaded,
                sources,
                columns,
                options,
                against_full=against_full or "full" in policies,
                first=start,
                out=None if out is None else Path(out),
                display=display,
            )
    if compared.failure is not None:
        raise compared.failure
    flat = rows(compared.cells, start)
    return Comparison(flat, means(flat), document(compared.cells, compared.complete, start))
