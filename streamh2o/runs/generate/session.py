"""A session of generation: a text is read and continued, or turns of a chat, to stdout and to a transcript."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UserError
from streamh2o.models.prompts import Prompter
from streamh2o.runs.generate.generator import Characters, Generator, Sampling
from streamh2o.runs.generate.transcript import Transcript
from streamh2o.runs.interrupt import Interrupt, Stopped
from streamh2o.runs.outputs import json_lines, write_whole
from streamh2o.runs.saving.checks import require_count, require_reader, telling_damage
from streamh2o.terminal_safe import visible
from streamh2o.text import TokenReader
from streamh2o.versions import versions

if TYPE_CHECKING:
    from torch import Tensor

    from streamh2o.models.load import Loaded
    from streamh2o.runs.generate.chat import Talk
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.stream.stream_cache import StreamCache
    from streamh2o.text import Source

_INTERRUPTED = 130


@dataclass
class Session:
    """What is to be written with what.

    count: most new tokens, of an answer in a chat; None for no end. stop_at_end: stop where the model ends the text.
    stopped: why it ended, for the result.
    """

    loaded: Loaded
    cache: StreamCache
    sampling: Sampling
    count: int | None
    chat: bool
    stop_at_end: bool
    stopped: str = "max-new-tokens"

    def generator(self) -> Generator:
        ends = Prompter(self.loaded.tokenizer).ends()
        return Generator(self.loaded, self.cache, self.sampling, ends, endless=not (self.chat or self.stop_at_end))

    def result(self, generator: Generator, complete: bool) -> dict[str, Any]:
        """What `--json` prints."""
        cache = self.cache
        return {
            "schema": 1,
            "model": self.loaded.info(),
            "policy": cache.policy.name,
            "knobs": asdict(cache.policy),
            "cache": cache.policy.cache,
            "chunk": cache.chunk,
            "evict_every": cache.evict_every,
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "device": str(self.loaded.device),
            "sampling": {**asdict(self.sampling), "seed": generator.sampler.seed},
            "prompt_tokens": generator.read_tokens,
            "new_tokens": generator.new_tokens,
            "seconds": generator.seconds,
            "tokens_per_second": generator.new_tokens / generator.seconds if generator.seconds else None,
            "slots": cache.slots,
            "max_slots": cache.max_slots,
            "evictions": cache.evictions,
            "kv_bytes": cache.kv_bytes,
            "stopped": self.stopped,
            "complete": complete,
            "versions": versions(),
        }


@dataclass
class Standing:
    """Where the continuation of a text stands between two blocks read or two tokens written, for `--checkpoint`.

    reader: of `TokenReader.state`, until the text has been read. written: new tokens.
    """

    generator: Generator
    characters: Characters
    reader: dict[str, Any] | None = None
    read: bool = False
    written: int = 0

    @property
    def tokens(self) -> int:
        return self.generator.read_tokens + self.generator.new_tokens

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, counts = self.generator.state()
        rest = {"reader": self.reader, "read": self.read, "written": self.written}
        return tensors, {**rest, "generator": counts, "characters": self.characters.state()}

    def load_state(self, tensors: dict[str, Tensor], counts: dict[str, Any]) -> None:
        """Raises UserError, LookupError, TypeError or ValueError where it is not what `state` gave."""
        require_count(counts["written"])
        if counts["reader"] is not None:
            require_reader(counts["reader"])
        self.reader, self.read, self.written = counts["reader"], bool(counts["read"]), counts["written"]
        self.characters.load_state(counts["characters"])
        self.generator.load_state(tensors, counts["generator"])


def run(
    session: Session,
    source: Source | None,
    talk: Talk | None,
    reading: dict[str, Any],
    transcript: Path | None,
    json: Path | None,
    quiet: bool,
    keeper: Keeper | None = None,
) -> int:
    """Write until the session's count, the model's end, the end of a chat, or Ctrl-C; returns the exit code.

    source: the text to continue; talk: the chat, where there is none. reading: options of `TokenReader`. keeper: saves
    the continuation of a text, and knows where it goes on.
    """
    generator = session.generator()
    standing = Standing(generator, Characters(session.loaded.tokenizer))
    keep = keeper.keep if keeper else lambda *_: None
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        file = None
        if transcript is not None:
            file = stack.enter_context(Transcript(transcript, keeper.marks.get("--transcript") if keeper else None))
        if keeper is not None and file is not None:
            keeper.outputs.files["--transcript"] = file
        if keeper is not None and keeper.state is not None:
            with telling_damage("The checkpoint"):
                standing.load_state(*keeper.state)
        writer = Writer(file, shown=str(json) != "-")
        try:
            if talk is not None:
                _chat(session, generator, talk, writer, interrupt)
            elif source is not None:
                _read(session, standing, source, reading, interrupt, keep)
                _write(session, standing, writer, interrupt, keep)
        except Stopped:
            session.stopped = "interrupted"
            keep(standing, True)
        interrupted = session.stopped == "interrupted"
        result = session.result(generator, complete=not interrupted)
        if keeper is not None and not interrupted:
            keeper.done({"tokens": standing.tokens, **result}, stopping=False, last=True)
    report(result, json)
    if not quiet and generator.seconds:
        rate, slots = generator.new_tokens / generator.seconds, session.cache.max_slots
        note = f"{generator.new_tokens:,} tokens, {rate:.1f} tokens/s, at most {slots:,} slots, seed "
        print(f"\n{note}{generator.sampler.seed}", file=sys.stderr, flush=True)
        if keeper is not None and interrupted and (where := keeper.where()):
            print(where, file=sys.stderr, flush=True)
    return _INTERRUPTED if interrupted else 0


def report(result: dict[str, Any], json: Path | None) -> None:
    """The result to where `--json` says."""
    if json is not None and str(json) != "-":
        write_whole(json, json_lines([result]).encode())
    if str(json) == "-":
        print(json_lines([result]), end="", flush=True)


class Writer:
    """Text as it comes: to stdout, where a terminal may not obey it, and to the transcript."""

    def __init__(self, transcript: Transcript | None, shown: bool) -> None:
        self._transcript, self._shown = transcript, shown
        self._terminal = sys.stdout.isatty()

    def write(self, text: str, said: bool = False) -> None:
        """said: by the user, so that it stands on the terminal already."""
        if not text:
            return
        if self._transcript is not None:
            self._transcript.write(text)
        if self._shown and not said:
            parts = (visible(part, keep_newlines=True) for part in text.split("\t"))
            print("\t".join(parts) if self._terminal else text, end="", flush=True)


def _read(
    session: Session,
    standing: Standing,
    source: Source,
    reading: dict[str, Any],
    interrupt: Interrupt,
    keep: Callable[[Standing, bool], None],
) -> None:
    """Read the whole text, or what is left of it."""
    if standing.read:
        return
    with TokenReader(source, session.loaded.tokenizer, **reading, state=standing.reader) as reader:
        while True:
            with interrupt.waiting():
                block = reader.read(session.cache.chunk)
            if block is None:
                break
            standing.generator.read(block.ids.tolist())
            standing.characters = Characters(session.loaded.tokenizer, block.ids.tolist())
            standing.reader = reader.state()
            keep(standing, False)
    if not standing.tokens:
        raise UserError(f"{source.name}: is empty, so there is nothing to continue; give it a word at least.")
    standing.read = True


def _write(
    session: Session,
    standing: Standing,
    writer: Writer,
    interrupt: Interrupt,
    keep: Callable[[Standing, bool], None] = lambda *_: None,
) -> None:
    """New text until the session's count, the model's end, or Ctrl-C."""
    characters = standing.characters
    session.stopped = "max-new-tokens"
    for token in standing.generator.tokens(None if session.count is None else session.count - standing.written):
        standing.written += 1
        writer.write(characters.feed(token))
        keep(standing, interrupt.requested)
        if interrupt.requested:
            session.stopped = "interrupted"
            break
    else:
        if session.count is None or standing.written < session.count:
            session.stopped = "end"
    writer.write(characters.flush())


def _chat(session: Session, generator: Generator, talk: Talk, writer: Writer, interrupt: Interrupt) -> None:
    session.stopped = "end"
    for words in _turns(interrupt):
        writer.write(f"> {words}\n\n", said=True)
        ids = talk.turn(words)
        generator.read(ids)
        _write(session, Standing(generator, Characters(session.loaded.tokenizer, ids)), writer, interrupt)
        writer.write("\n\n")
        if interrupt.requested:
            return
    session.stopped = "end"


def _turns(interrupt: Interrupt) -> Iterator[str]:
    """What the user says: a line each, empty ones left out, until the end of stdin."""
    lines: Iterable[str] = _typed() if sys.stdin.isatty() else sys.stdin
    reader = iter(lines)
    while True:
        with interrupt.waiting():
            line = next(reader, None)
        if line is None:
            return
        words = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()
        if words:
            yield words


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (lets `input` edit a line)
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
