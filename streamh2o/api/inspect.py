"""`streamh2o.inspect`: what the command `inspect` does, as a function."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.api.inputs import Input, to_source
from streamh2o.api.model import to_loaded, torch_threads
from streamh2o.api.policy import to_policy
from streamh2o.errors import UserError

if TYPE_CHECKING:
    from streamh2o.api.model import Model
    from streamh2o.policies import Policy
    from streamh2o.runs.inspect.cache_contents import CacheContents


@dataclass(frozen=True)
class Inspection:
    """What one stream left in its cache. Printed, it is the summary of the command.

    contents: arrays of what each layer and KV head holds, how old it is and how it ranks. failure: what ended the
    stream early, if anything did.
    """

    contents: CacheContents = field(repr=False)
    failure: UserError | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `streamh2o inspect --json` prints: the result of `perplexity`, and what the cache holds as `kept`."""
        return self.contents.to_dict()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, one HTML file without scripts. Raises UserError where `path` can't be written."""
        from streamh2o.report.inspect_page import page
        from streamh2o.runs.outputs import write_whole

        write_whole(Path(path), page(self.contents).encode())

    def __str__(self) -> str:
        from streamh2o.report.inspect_summary import render_inspection
        from streamh2o.terminal import as_text

        return as_text(render_inspection(self.contents, None))


def inspect(
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
    **knobs: Any,
) -> Inspection:
    """Stream a text under any policy, and look at what the cache holds at its end.

    input, text: one of them. A path, an open file or an iterable of pieces of text; or the text itself.
    model: a name as on the command line, what `load_model` returns, or a pair (model, tokenizer) of transformers.
    policy, cache, sinks, recent, hitters, knobs: what the cache keeps; see `make_policy`. cache counts slots per layer
    and KV head. A policy made by `make_policy` has these numbers already.
    chunk: tokens of one forward pass. per_head: `kv` or `query`, which chooses its own slots.
    max_tokens: read at most so many tokens. bos: `auto`, `yes` or `no`. newline: `keep` or `lf`. errors: `strict` or
    `replace` bytes that are not UTF-8. allow_special: names of special tokens in the text become these tokens.
    dtype, device: for a model given by its name. threads: None leaves those of torch alone. kernel: how attention is
    computed, `auto`, `compiled` or `torch`. progress: show it on stderr.

    Raises UsageError for options that do not fit and for a policy that keeps nothing, UserError for a text that cannot
    be read or is empty. Where that shows after some chunks, the inspection is of the text before, and has a `failure`.

        found = streamh2o.inspect("book.txt", policy="h2o", cache=512)
        found.save("book.html")
    """
    source = to_source(input, text, "inspect")
    chosen = to_policy(policy, cache, sinks=sinks, recent=recent, hitters=hitters, **knobs)

    from streamh2o.report.live import make_display
    from streamh2o.runs.inspect.cache_contents import inspect_source
    from streamh2o.runs.options import RunOptions

    options = RunOptions(
        chunk=chunk,
        max_tokens=max_tokens,
        bos=bos,
        newline=newline,
        errors=errors,
        allow_special=allow_special,
        per_head=per_head,
    )
    with torch_threads(threads):
        loaded = to_loaded(model, dtype=dtype, device=device, kernel=kernel)
        with make_display(quiet=not progress) as display:
            display.begin(source.name)
            contents = inspect_source(loaded, source, chosen, options, [display])
    return Inspection(contents, contents.failure)
