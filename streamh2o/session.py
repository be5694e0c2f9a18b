"""A session of generation: a text is read and continued, or turns of a chat, to stdout and to a transcript."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UserError
from streamh2o.generate import Characters, Generator, Sampling
from streamh2o.interrupt import Interrupt, Stopped
from streamh2o.outputs import json_lines, write_whole
from streamh2o.prompts import Prompter
from streamh2o.report.visible import visible
from streamh2o.text import TokenReader
from streamh2o.transcript import Transcript
from streamh2o.versions import versions

if TYPE_CHECKING:
    from streamh2o.chat import Talk
    from streamh2o.models import Loaded
    from streamh2o.stream_cache import StreamCache
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


def run(
    session: Session,
    source: Source | None,
    talk: Talk | None,
    reading: dict[str, Any],
    transcript: Path | None,
    json: Path | None,
    quiet: bool,
) -> int:
    """Write until the session's count, the model's end, the end of a chat, or Ctrl-C; returns the exit code.

    source: the text to continue; talk: the chat, where there is none. reading: options of `TokenReader`.
    """
    generator = session.generator()
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        file = stack.enter_context(Transcript(transcript)) if transcript is not None else None
        writer = Writer(file, shown=str(json) != "-")
        try:
            if talk is not None:
                _chat(session, generator, talk, writer, interrupt)
            elif source is not None:
                before = _read(session, generator, source, reading, interrupt)
                _write(session, generator, before, writer, interrupt)
        except Stopped:
            session.stopped = "interrupted"
    interrupted = session.stopped == "interrupted"
    result = session.result(generator, complete=not interrupted)
    if json is not None and str(json) != "-":
        write_whole(json, json_lines([result]).encode())
    if str(json) == "-":
        print(json_lines([result]), end="", flush=True)
    if not quiet and generator.seconds:
        rate, slots = generator.new_tokens / generator.seconds, session.cache.max_slots
        note = f"{generator.new_tokens:,} tokens, {rate:.1f} tokens/s, at most {slots:,} slots, seed "
        print(f"\n{note}{generator.sampler.seed}", file=sys.stderr, flush=True)
    return _INTERRUPTED if interrupted else 0


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
    session: Session, generator: Generator, source: Source, reading: dict[str, Any], interrupt: Interrupt
) -> list[int]:
    """Read the whole text; returns its last ids."""
    last: list[int] = []
    with TokenReader(source, session.loaded.tokenizer, **reading) as reader, interrupt.waiting():
        for block in reader.blocks(session.cache.chunk):
            last = block.ids.tolist()
            generator.read(last)
    if not last:
        raise UserError(f"{source.name}: is empty, so there is nothing to continue; give it a word at least.")
    return last


def _write(session: Session, generator: Generator, before: list[int], writer: Writer, interrupt: Interrupt) -> None:
    """New text until the session's count, the model's end, or Ctrl-C."""
    characters = Characters(session.loaded.tokenizer, before)
    session.stopped = "max-new-tokens"
    written = 0
    for written, token in enumerate(generator.tokens(session.count), 1):  # noqa: B007 (used below)
        writer.write(characters.feed(token))
        if interrupt.requested:
            session.stopped = "interrupted"
            break
    else:
        if session.count is None or written < session.count:
            session.stopped = "end"
    writer.write(characters.flush())


def _chat(session: Session, generator: Generator, talk: Talk, writer: Writer, interrupt: Interrupt) -> None:
    session.stopped = "end"
    for words in _turns(interrupt):
        writer.write(f"> {words}\n\n", said=True)
        ids = talk.turn(words)
        generator.read(ids)
        _write(session, generator, ids, writer, interrupt)
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
