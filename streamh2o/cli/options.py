"""Options that several commands share; those of the model and of checkpoints are in model_and_checkpoint.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli.values import at_least, chunk_or_auto, one_of

if TYPE_CHECKING:
    from streamh2o.policies import Policy

_CACHE, _INPUT, _OUTPUT = "Cache", "Input", "Output"
_DEFINITION = "Definition of perplexity"

Cache = Annotated[
    int,
    typer.Option(
        metavar="N", rich_help_panel=_CACHE, help="Slots kept per layer and KV head: sinks + hitters + recent."
    ),
]
Sinks = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=_CACHE, show_default="the policy's, mostly 4", help="First tokens, never evicted."
    ),
]


@dataclass(frozen=True)
class CacheOptions:
    """What a cache of which size keeps."""

    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_CACHE,
            help="What the cache keeps: streamh2o, h2o, streamingllm, local, full, recompute; of the papers' other "
            "baselines h2-only, sparse-strided, sparse-fixed and topk (these three with +h2 too), spatten.",
        ),
    ] = "streamh2o"
    cache: Cache = 1024
    sinks: Sinks = None
    recent: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel=_CACHE, show_default="the policy's share", help="Newest tokens, never evicted."
        ),
    ] = None
    hitters: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_CACHE,
            show_default="the policy's share",
            help="Tokens in between with the highest score.",
        ),
    ] = None
    far: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_CACHE,
            show_default="the policy's",
            help="Count only attention from at least so many tokens away.",
        ),
    ] = None
    decay: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            rich_help_panel=_CACHE,
            show_default="the policy's",
            help="What is left of a score after another 256 tokens; 1 never fades.",
        ),
    ] = None
    positions: Annotated[
        str | None,
        typer.Option(
            metavar="rolled|distance",
            callback=one_of("--positions", "rolled", "distance"),
            rich_help_panel=_CACHE,
            show_default="the policy's",
            help="Where hitters stand: packed in cache order, or at their true distance.",
        ),
    ] = None

    def make_policy(self) -> Policy:
        from dataclasses import asdict

        from streamh2o.policies import make_policy

        knobs: dict[str, Any] = asdict(self)
        return make_policy(knobs.pop("policy"), **knobs)


@dataclass(frozen=True)
class ReadOptions:
    """How the text of an input is read."""

    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, rich_help_panel=_INPUT, help="Read at most so many tokens of each input."),
    ] = None
    bos: Annotated[
        str,
        typer.Option(
            metavar="auto|yes|no",
            callback=one_of("--bos", "auto", "yes", "no"),
            rich_help_panel=_INPUT,
            help="Put the tokenizer's BOS first; auto does what the tokenizer itself does.",
        ),
    ] = "auto"
    newline: Annotated[
        str,
        typer.Option(
            metavar="keep|lf",
            callback=one_of("--newline", "keep", "lf"),
            rich_help_panel=_INPUT,
            help="Keep line ends, or make every one a line feed.",
        ),
    ] = "keep"
    errors: Annotated[
        str,
        typer.Option(
            metavar="strict|replace",
            callback=one_of("--errors", "strict", "replace"),
            rich_help_panel=_INPUT,
            help="Bytes that are not UTF-8: stop and say where, or read them as U+FFFD.",
        ),
    ] = "strict"
    allow_special: Annotated[
        bool,
        typer.Option(
            "--allow-special",
            rich_help_panel=_INPUT,
            help="Let text such as <|im_end|> become the special token of that name.",
        ),
    ] = False


PerHead = Annotated[
    str,
    typer.Option(
        "--per-head",
        metavar="kv|query",
        rich_help_panel=_CACHE,
        help="Let each KV head choose its slots, or each query head, which takes as many times the memory.",
    ),
]
Chunk = Annotated[
    int,
    typer.Option(
        metavar="N", callback=at_least("--chunk", 1), rich_help_panel=_CACHE, help="Tokens of one forward pass."
    ),
]
ChunkOrAuto = Annotated[
    int,
    typer.Option(
        metavar="N|auto",
        parser=chunk_or_auto,
        rich_help_panel=_CACHE,
        help="Tokens of one forward pass; auto tries which number is fastest here, for a few seconds.",
    ),
]
Evict = Annotated[
    str,
    typer.Option(
        "--evict",
        metavar="chunk|token",
        callback=one_of("--evict", "chunk", "token"),
        rich_help_panel=_CACHE,
        help="Evict after each chunk, or after every token: the losses of --chunk 1 at several times its speed.",
    ),
]
KvBits = Annotated[
    int,
    typer.Option(
        "--kv-bits",
        metavar="16|8|4",
        rich_help_panel=_CACHE,
        help="Keep keys and values as integers of 8 or 4 bits, but for the sinks and the 16 newest tokens.",
    ),
]
PplDef = Annotated[
    str,
    typer.Option(
        "--ppl-def",
        metavar="stream|hf|llamacpp|lmeval",
        callback=one_of("--ppl-def", "stream", "hf", "llamacpp", "lmeval"),
        rich_help_panel=_DEFINITION,
        help="Which tokens are scored, and with which context: this project's stream, or as another tool does it.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_DEFINITION,
        show_default="the tool's",
        help="Most tokens the model reads at once, where --ppl-def is not stream.",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_DEFINITION,
        show_default="512",
        help="How far apart the windows of --ppl-def hf begin.",
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        "--batch",
        metavar="N",
        min=1,
        rich_help_panel=_INPUT,
        help="So many inputs side by side in each pass, each with a cache of its own.",
    ),
]
Rows = Annotated[
    bool,
    typer.Option("--rows", rich_help_panel=_INPUT, help="Every row of a data set (hf:) is an input of its own."),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE|-", rich_help_panel=_OUTPUT, help="The result, one JSON object a line per input."
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=_OUTPUT, help="A picture of it, .png, .svg or .pdf."),
]
Log = Annotated[Path | None, typer.Option(metavar="FILE.jsonl", rich_help_panel=_OUTPUT, help="A JSON line per chunk.")]
NllOut = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npy",
        rich_help_panel=_OUTPUT,
        help="Every loss, in nats: one float32 per scored token, inputs one after another.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", rich_help_panel=_OUTPUT, help="No progress and no notes on stderr.")]
