"""`streamh2o`: finds the command, runs it, and turns whatever goes wrong into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from streamh2o.errors import BAD_USAGE, DONE, FAILED, INTERRUPTED, UsageError, UserError, out_of_memory
from streamh2o.versions import __version__

# One row a command: the name of its file in this folder, and what `streamh2o --help` says of it. The file holds
# `app`, a Typer app, and is imported only when its command is called.
COMMANDS = {
    "ppl": "Running perplexity of files, globs, - (stdin) or hf:DATASET[:CONFIG]:SPLIT[:COLUMN].",
    "answer": "Answers to questions about a text of any length, with where they stand in it.",
    "needle": "What is found again in a long text, by length, depth and policy: table and heat map.",
    "generate": "Continues a text, or chats, without end in the same memory.",
    "compare": "Several policies and cache sizes on the same tokens: a table and two pictures.",
    "inspect": "What the cache kept of a text, as a page to look at.",
    "plot": "Pictures from the logs that --log wrote.",
    "bench": "Speed against the machine's limit, as ratios within one run.",
    "doctor": "Whether this machine is fit: versions, device, memory, and losses that add up.",
    "models": "Which models are at hand, and `models get NAME`.",
}


class LazyGroup(TyperGroup):
    """Imports a command's file when the command is called, so that `--help` and `--version` answer at once."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        app: typer.Typer = importlib.import_module(f"streamh2o.cli.{cmd_name}").app
        app.rich_markup_mode = None
        app._add_completion = False
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
            raise UsageError(f"There is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="streamh2o",
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"streamh2o {__version__}")
        raise typer.Exit


@app.callback()
def streamh2o(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Show version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Stream texts of any length through a language model with a KV cache of fixed size.

    The cache keeps the first tokens, the newest ones, and the heavy hitters: those that later text looked at most. So
    memory and speed stay the same, whether the text has a thousand tokens or a hundred million.

    \b
    Examples:
      streamh2o ppl book.txt
      zcat corpus.gz | streamh2o ppl - --cache 512 --log run.jsonl
      streamh2o plot run.jsonl --plot run.png

    Progress and messages go to stderr, results to stdout. Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted
    (what was finished is reported and saved).
    """


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script: run a command line and exit with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options  # anywhere, not only before the command
    arguments = [argument for argument in options if argument != "--debug"] + arguments[len(options) :]
    _prepare(debug)
    code = _call(arguments, debug)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_left()
    except OSError as error:
        code = _fail(_unwritten(error), FAILED, debug)
        _reader_left()
    sys.exit(code)


def _open_closed_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed (`>&-`), before another file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _prepare(debug: bool) -> None:
    _open_closed_streams()
    if not debug:
        warnings.simplefilter("ignore")  # of libraries; they frighten, and nothing can be done about them here
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one reader thread; the cores belong to the model
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. `seen` stays true if a library turns the exception into one of its own, as imports can."""

    seen = False


def _stop(number: int, frame: FrameType | None) -> None:
    _Interrupted.seen = True
    raise _Interrupted


def _call(arguments: list[str], debug: bool) -> int:
    """Run one command line; returns the exit code."""
    _Interrupted.seen = False
    try:
        if not arguments:
            typer.main.get_command(app).main(["--help"], prog_name="streamh2o", standalone_mode=False)
            return BAD_USAGE
        code = typer.main.get_command(app).main(arguments, prog_name="streamh2o", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except UserError as error:
        return _fail(str(error), error.exit_code, debug)
    except Exception as error:
        if _Interrupted.seen:
            return INTERRUPTED
        if out_of_memory(error):
            return _fail("out of memory; use a smaller --cache, --chunk or model.", FAILED, debug)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(_unwritten(error), FAILED, debug)
        # Errors in the command line itself; Typer's classes for them have moved between releases.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            path = getattr(getattr(error, "ctx", None), "command_path", "streamh2o")
            return _fail(f"{error.format_message().rstrip('.')}; see {path} --help.", error.exit_code, debug=False)
        what = " ".join(str(error).split())
        hint = "this should not happen: run it again with --debug and report what it shows"
        return _fail(f"{type(error).__name__}: {what} ({hint}).", FAILED, debug)


def _unwritten(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename or 'the output'} can't be written ({reason}); free some space or send it elsewhere."


def _fail(message: str, code: int, debug: bool) -> int:
    from streamh2o.terminal_safe import visible

    if debug:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"streamh2o: error: {visible(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return code


def _reader_left() -> int:
    """Whoever read our output has gone (`| head`): end quietly, and let the interpreter flush into nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    return FAILED


if __name__ == "__main__":
    run()
