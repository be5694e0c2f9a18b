"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamh2o.cli.values import chunk_or_auto, one_of

_MODEL, _CACHE, _INPUT, _OUTPUT, _CHECKPOINT = "Model", "Cache", "Input", "Output", "Checkpoint"
_DEFINITION = "Definition of perplexity"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        rich_help_panel=_MODEL,
        help="A name (see `streamh2o models`), a Hugging Face folder, a .gguf file or a hub id.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        rich_help_panel=_MODEL,
        help="Number format; auto is bfloat16 where the processor has fast instructions for it, else float32.",
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="plain|packed",
        callback=one_of("--weights", "plain", "packed"),
        rich_help_panel=_MODEL,
        help="packed keeps the matrices of a GGUF file (Q2_K to Q8_0, IQ4_NL) in its blocks, on a CPU: the same "
        "numbers in a fraction of the memory; text is generated faster, in bfloat16 it is read more slowly.",
    ),
]
Device = Annotated[
    str,
    typer.Option(metavar="DEVICE", rich_help_panel=_MODEL, help="auto, cpu, cuda, cuda:N or mps; auto takes a GPU."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="auto",
        rich_help_panel=_MODEL,
        help="Spread the layers over all GPUs, and what does not fit over memory and disk.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        rich_help_panel=_MODEL,
        show_default="the cores at hand",
        help="Processor threads. Digits can differ in the last places between counts.",
    ),
]
Kernel = Annotated[
    str,
    typer.Option(
        metavar="auto|torch|compiled",
        rich_help_panel=_MODEL,
        help="How attention is computed; auto is compiled (for this machine, at first use; on a GPU by Triton) where "
        "it can be, else torch.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", rich_help_panel=_MODEL, help="Run code that the model brings along."),
]

Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_CACHE,
        help="What the cache keeps: streamh2o, h2o, streamingllm, local, full, recompute; of the papers' other "
        "baselines h2-only, sparse-strided, sparse-fixed and topk (these three with +h2 too), spatten.",
    ),
]
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
Recent = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=_CACHE, show_default="the policy's share", help="Newest tokens, never evicted."
    ),
]
Hitters = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_CACHE,
        show_default="the policy's share",
        help="Tokens in between with the highest score.",
    ),
]
Far = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_CACHE,
        show_default="the policy's",
        help="Count only attention from at least so many tokens away.",
    ),
]
Decay = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        rich_help_panel=_CACHE,
        show_default="the policy's",
        help="What is left of a score after another 256 tokens; 1 never fades.",
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        metavar="rolled|distance",
        callback=one_of("--positions", "rolled", "distance"),
        rich_help_panel=_CACHE,
        show_default="the policy's",
        help="Where hitters stand: packed in cache order, or at their true distance.",
    ),
]
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
    typer.Option(metavar="N", rich_help_panel=_CACHE, help="Tokens of one forward pass."),
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
MaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, rich_help_panel=_INPUT, help="Read at most so many tokens of each input."),
]
Bos = Annotated[
    str,
    typer.Option(
        metavar="auto|yes|no",
        callback=one_of("--bos", "auto", "yes", "no"),
        rich_help_panel=_INPUT,
        help="Put the tokenizer's BOS first; auto does what the tokenizer itself does.",
    ),
]
Newline = Annotated[
    str,
    typer.Option(
        metavar="keep|lf",
        callback=one_of("--newline", "keep", "lf"),
        rich_help_panel=_INPUT,
        help="Keep line ends, or make every one a line feed.",
    ),
]
Errors = Annotated[
    str,
    typer.Option(
        metavar="strict|replace",
        callback=one_of("--errors", "strict", "replace"),
        rich_help_panel=_INPUT,
        help="Bytes that are not UTF-8: stop and say where, or read them as U+FFFD.",
    ),
]
AllowSpecial = Annotated[
    bool,
    typer.Option(
        "--allow-special",
        rich_help_panel=_INPUT,
        help="Let text such as <|im_end|> become the special token of that name.",
    ),
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

Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", rich_help_panel=_CHECKPOINT, help="Save the run in this folder, to go on after whatever happens."
    ),
]
CheckpointEvery = Annotated[
    str,
    typer.Option(metavar="60s|N", rich_help_panel=_CHECKPOINT, help="How often: a time (s, m, h), or N tokens."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=_CHECKPOINT,
        help="Go on from DIR, with the same digits; stdin has to be piped in again. Start anew if it is empty.",
    ),
]
