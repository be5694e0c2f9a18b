"""`streamh2o generate`: continues a text or chats, without end in bounded memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import CheckpointOptions, ModelOptions, check_checkpoint
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.errors import DONE, INTERRUPTED

if TYPE_CHECKING:
    from streamh2o.cli.generate_io import TextOutput
    from streamh2o.models.loaded import Loaded
    from streamh2o.runs.generate.chat import Chat
    from streamh2o.runs.generate.generation import Generation
    from streamh2o.runs.generate.sampling import Sampling
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.stream.stream_cache import StreamCache
    from streamh2o.text import Source

app = make_app()
_SAMPLING = "Sampling"


@app.command(cls=ManualCommand)
@expand_groups
def generate(
    ctx: typer.Context,
    *,
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
    machine: ModelOptions,
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
    caching: opt.CacheOptions,
    chunk: opt.Chunk = 256,
    reading: Annotated[opt.ReadOptions, Without("max_tokens", "newline", "allow_special")],
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
    saving: CheckpointOptions,
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
    from streamh2o.policies import find_policy
    from streamh2o.runs.generate.sampling import Sampling
    from streamh2o.runs.outputs import check_outputs, is_stdout

    source = _source(input, prompt, chat, system)
    if is_stdout(json) and transcript is None:
        raise UsageError("--json - takes the place of the text on stdout; name a --transcript for the text.")
    if chat and saving.checkpoint is not None:
        raise UsageError(
            "--checkpoint saves a text that is continued, and no chat; its --transcript keeps what was said."
        )
    if chat:  # whose sinks follow from the system prompt
        find_policy(caching.policy)
    else:
        caching.make_policy()
    if greedy and (given := ctx.get_parameter_source("temperature")) and given.name == "COMMANDLINE":
        raise UsageError("--greedy takes the likeliest token, whatever --temperature says; leave one of them out.")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repeat_last, greedy, seed)
    inputs = [machine.model] if source is None else [source.name, machine.model]
    check_outputs({"--transcript": transcript, "--json": json}, inputs)
    plan = _Plan(
        source,
        prompt,
        system,
        sampling,
        {**asdict(caching), "chunk": chunk},
        {"bos": reading.bos, "errors": reading.errors},
        max_new_tokens,
        stop_at_end,
        transcript,
        json,
        quiet,
    )

    from contextlib import nullcontext

    keeper = saving.open(plan.note)
    with keeper or nullcontext():
        if keeper is not None:
            sources = [source] if source else []
            machine = check_checkpoint(machine, keeper, sources, plan.described(), {"--transcript": transcript})
        if keeper is not None and keeper.finished:
            plan.note(f"{saving.checkpoint}: this text had come to its end.")
            _write_json({name: value for name, value in keeper.results[0].items() if name != "tokens"}, json)
            return
        raise typer.Exit(_run(plan, machine.load(), keeper))


@dataclass(frozen=True)
class _Plan:
    """What was asked for, apart from the model. source: None for a chat."""

    source: Source | None
    prompt: str | None
    system: str | None
    sampling: Sampling
    slots: dict[str, Any]
    reading: dict[str, Any]
    max_new_tokens: int
    stop_at_end: bool
    transcript: Path | None
    json: Path | None
    quiet: bool

    def described(self) -> dict[str, Any]:
        """Every option that the text depends on."""
        length = {"max_new_tokens": self.max_new_tokens, "stop_at_end": self.stop_at_end, "prompt": self.prompt}
        return {**self.slots, **asdict(self.sampling), **self.reading, **length}

    def note(self, line: str) -> None:
        """A line for people, on stderr."""
        import sys

        if not self.quiet:
            print(line, file=sys.stderr, flush=True)


def _run(plan: _Plan, loaded: Loaded, keeper: Keeper | None) -> int:
    """Write the text or the answers; returns the exit code."""
    from contextlib import ExitStack

    from streamh2o.cli.generate_io import TextOutput
    from streamh2o.runs.generate.transcript import Transcript
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.outputs import is_stdout
    from streamh2o.stream.stream_cache import StreamCache

    chat = _chat(plan, loaded) if plan.source is None else None
    sinks = plan.slots["sinks"] if chat is None else max(plan.slots["sinks"] or 4, len(chat.pinned))
    with ExitStack() as stack:
        cache = stack.enter_context(
            StreamCache.for_model(loaded, kernel=loaded.kernel, **{**plan.slots, "sinks": sinks})
        )
        interrupt = stack.enter_context(Interrupt())
        transcript = None
        if plan.transcript is not None:
            mark = keeper.marks.get("--transcript") if keeper else None
            transcript = stack.enter_context(Transcript(plan.transcript, mark))
            if keeper is not None:
                keeper.outputs.files["--transcript"] = transcript
        output = TextOutput(transcript, shown=not is_stdout(plan.json))
        generation = _write(plan, loaded, cache, chat, output, interrupt, keeper)
        result = generation.to_dict()
        if keeper is not None and generation.complete:
            tokens = generation.prompt_tokens + generation.new_tokens
            keeper.done({"tokens": tokens, **result}, stopping=False, last=True)
    _write_json(result, plan.json)
    if generation.tokens_per_second is not None:
        plan.note(
            f"\n{generation.new_tokens:,} tokens, {generation.tokens_per_second:.1f} tokens/s, at most "
            f"{generation.max_slots:,} slots, seed {generation.sampling['seed']}"
        )
    if keeper is not None and not generation.complete and (where := keeper.where()):
        plan.note(where)
    return DONE if generation.complete else INTERRUPTED


def _write(
    plan: _Plan,
    loaded: Loaded,
    cache: StreamCache,
    chat: Chat | None,
    output: TextOutput,
    interrupt: Interrupt,
    keeper: Keeper | None,
) -> Generation:
    from streamh2o.cli.generate_io import turns
    from streamh2o.runs.generate.chat import answer_turns
    from streamh2o.runs.generate.continuation import continue_text
    from streamh2o.runs.options import RunOptions

    how: dict[str, Any] = {
        "max_new_tokens": plan.max_new_tokens or None,
        "on_text": output.write,
        "interrupt": interrupt,
    }
    if chat is not None:
        return answer_turns(loaded, cache, chat, output.with_turns(turns()), plan.sampling, **how)
    assert plan.source is not None
    if keeper is not None:
        how |= {"saved": keeper.state, "keep": keeper.keep}
    options = RunOptions(**plan.reading)
    return continue_text(loaded, cache, plan.source, plan.sampling, options, stop_at_end=plan.stop_at_end, **how)


def _chat(plan: _Plan, loaded: Loaded) -> Chat:
    from streamh2o.errors import UsageError
    from streamh2o.runs.generate.chat import Chat

    chat, slots = Chat(loaded.tokenizer, plan.system), plan.slots["cache"]
    if len(chat.pinned) > slots // 2:
        raise UsageError(
            f"--system has {len(chat.pinned)} tokens, which are never evicted, and --cache {slots} must have twice as "
            "many slots; raise it or shorten the system prompt."
        )
    return chat


def _write_json(result: dict[str, Any], json: Path | None) -> None:
    from streamh2o.cli.results import give_results
    from streamh2o.runs.outputs import json_lines

    give_results(json, json_lines([result]), lambda: None)


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
