"""`streamh2o generate`: continues a text or chats, without end in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app

if TYPE_CHECKING:
    from streamh2o.models.load import Loaded
    from streamh2o.runs.generate.chat import Talk
    from streamh2o.text import Source

app = make_app()
_SAMPLING = "Sampling"


@app.command(cls=ManualCommand)
def generate(
    ctx: typer.Context,
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT", show_default=False, help="The text to continue: a file (.gz and .xz too) or - for stdin."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", rich_help_panel="Text", help="The text to continue, here."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", rich_help_panel="Text", help="Answer what is typed, or each line of stdin, in turns."),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", rich_help_panel="Text", help="How to behave in the chat; never evicted."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, rich_help_panel="Text", help="Most tokens to write, in a chat per answer; 0: no end."
        ),
    ] = 512,
    stop_at_end: Annotated[
        bool,
        typer.Option(
            "--stop-at-end",
            rich_help_panel="Text",
            help="Stop where the model ends the text; else it may not, and goes on. A chat's answers always end.",
        ),
    ] = False,
    model: opt.Model = "smollm2-135m",
    dtype: opt.Dtype = "auto",
    weights: opt.Weights = "plain",
    device: opt.Device = "auto",
    device_map: opt.DeviceMap = None,
    threads: opt.Threads = None,
    kernel: opt.Kernel = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    temperature: Annotated[
        float, typer.Option(metavar="X", rich_help_panel=_SAMPLING, help="Above 1 bolder, below 1 safer; 0 is greedy.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_SAMPLING, help="Among the N likeliest tokens; 0: all.")
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="X", rich_help_panel=_SAMPLING, help="Among the likeliest that make up this probability; 1: all."
        ),
    ] = 0.95,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="X", rich_help_panel=_SAMPLING, help="Among those with this share of the likeliest's probability."
        ),
    ] = 0.05,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", rich_help_panel=_SAMPLING, help="Above 1 against repetition; 1: none.")
    ] = 1.1,
    repeat_last: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_SAMPLING, help="How many tokens back the penalty looks.")
    ] = 256,
    greedy: Annotated[
        bool, typer.Option("--greedy", rich_help_panel=_SAMPLING, help="Always the likeliest token.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="drawn", rich_help_panel=_SAMPLING, help="The same text again."),
    ] = None,
    policy: opt.Policy = "streamh2o",
    cache: opt.Cache = 1024,
    sinks: opt.Sinks = None,
    recent: opt.Recent = None,
    hitters: opt.Hitters = None,
    far: opt.Far = None,
    decay: opt.Decay = None,
    positions: opt.Positions = None,
    chunk: opt.Chunk = 256,
    bos: opt.Bos = "auto",
    errors: opt.Errors = "strict",
    transcript: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel="Output", help="All that is written, and in a chat said, as text."
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE|-", rich_help_panel="Output", help="Speed, slots and settings."),
    ] = None,
    quiet: opt.Quiet = False,
    checkpoint: opt.Checkpoint = None,
    checkpoint_every: opt.CheckpointEvery = "60s",
    resume: opt.Resume = False,
) -> None:
    """Continue a text, or chat, for as long as one likes: memory and time per token stay the same.

    Of a text of any length, the cache keeps what its policy keeps; so it is with what is written. In a chat, the system
    prompt is among the sinks and is never forgotten; earlier turns are, bit by bit.

    Characters are shown as soon as they are complete. On a terminal, control characters are shown as escapes.

    Ctrl-C ends the text after the token at hand; a second Ctrl-C quits at once.

    With --checkpoint DIR the text is saved once a minute, and when it is stopped; the same command with --resume then
    goes on with the same characters, also where it was killed. The transcript is cut back to the checkpoint first.

    \b
    Examples:
      streamh2o generate book.txt
      streamh2o generate --prompt "It was a dark and" --max-new-tokens 100000 --transcript story.txt
      tail -c 4000 book.txt | streamh2o generate - --temperature 0.6 --seed 1
      streamh2o generate --chat --system "You are a patient teacher."
    """
    from streamh2o.errors import UsageError
    from streamh2o.runs.outputs import check_outputs

    source = _source(input, prompt, chat, system)
    if str(json) == "-" and transcript is None:
        raise UsageError("--json - takes the place of the text on stdout; name a --transcript for the text.")
    if chat and checkpoint is not None:
        raise UsageError(
            "--checkpoint saves a text that is continued, and no chat; its --transcript keeps what was said."
        )
    inputs = [model] if source is None else [source.name, model]
    check_outputs({"--transcript": transcript, "--json": json}, inputs)

    from contextlib import nullcontext
    from dataclasses import asdict

    from streamh2o.cli.keeping import Machine, open_keeper, settle
    from streamh2o.runs.generate.generator import Sampling
    from streamh2o.runs.generate.session import Session, report, run
    from streamh2o.stream.stream_cache import StreamCache

    if chunk < 1:
        raise UsageError(f"--chunk is {chunk}; it must be at least 1.")
    if greedy and (given := ctx.get_parameter_source("temperature")) and given.name == "COMMANDLINE":
        raise UsageError("--greedy takes the likeliest token, whatever --temperature says; leave one of them out.")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repeat_last, greedy, seed)
    knobs: dict[str, Any] = {"recent": recent, "hitters": hitters, "far": far, "decay": decay, "positions": positions}
    reading = {"bos": bos, "errors": errors}
    slots_wanted = {"policy": policy, "cache": cache, "sinks": sinks, "chunk": chunk, **knobs}
    length = {"max_new_tokens": max_new_tokens, "stop_at_end": stop_at_end, "prompt": prompt}
    keeper = open_keeper(checkpoint, checkpoint_every, resume, _tell(quiet))
    with keeper or nullcontext():
        options = {**slots_wanted, **asdict(sampling), **reading, **length}
        machine = Machine(model, dtype, device, threads, kernel, trust_remote_code, device_map, weights)
        machine = settle(machine, keeper, [source] if source else [], options, {"--transcript": transcript})
        if keeper is not None and keeper.finished:
            _tell(quiet)(f"{checkpoint}: this text had come to its end.")
            report({name: value for name, value in keeper.results[0].items() if name != "tokens"}, json)
            return
        loaded = machine.load()
        talk = _talk(loaded, system, cache) if chat else None
        if talk is not None:
            sinks = max(sinks or 4, len(talk.pinned))
        with StreamCache.for_model(loaded.model, cache, policy, sinks=sinks, chunk=chunk, **knobs) as slots:
            session = Session(loaded, slots, sampling, max_new_tokens or None, talk is not None, stop_at_end)
            raise typer.Exit(run(session, source, talk, reading, transcript, json, quiet, keeper))


def _tell(quiet: bool) -> Callable[[str], None]:
    """What notes are given to."""
    import sys

    return lambda line: None if quiet else print(line, file=sys.stderr, flush=True)


def _source(input: str | None, prompt: str | None, chat: bool, system: str | None) -> Source | None:
    """The text to continue; None for a chat."""
    import io

    from streamh2o.errors import UsageError
    from streamh2o.text.sources import Source, open_inputs

    if chat:
        if input is not None or prompt is not None:
            raise UsageError("--chat takes no text to continue; say it in the first turn.")
        return None
    if system is not None:
        raise UsageError("--system belongs to a chat; add --chat, or put it into the text.")
    if (input is None) == (prompt is None):
        raise UsageError("Name one text to continue: a file, - for stdin, or --prompt TEXT; or add --chat.")
    if prompt is not None:
        data = prompt.encode("utf-8", "surrogateescape")
        return Source("--prompt", len(data), lambda: io.BytesIO(data))
    assert input is not None
    sources = open_inputs([input])
    if len(sources) != 1:
        raise UsageError(f"{input}: {len(sources)} files match, and one text is continued; name one.")
    return sources[0]


def _talk(loaded: Loaded, system: str | None, cache: int) -> Talk:
    from streamh2o.errors import UsageError
    from streamh2o.runs.generate.chat import Talk

    talk = Talk(loaded.tokenizer, system)
    if len(talk.pinned) > cache // 2:
        raise UsageError(
            f"--system has {len(talk.pinned)} tokens, which are never evicted, and --cache {cache} must have twice as "
            "many slots; raise it or shorten the system prompt."
        )
    return talk
