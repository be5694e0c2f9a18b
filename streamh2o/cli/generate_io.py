"""Where `generate` reads the turns of a chat from, and where it writes its text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from streamh2o.runs.generate.transcript import Transcript


class TextOutput:
    """Text as it comes: to stdout if `shown`, where a terminal may not obey it, and to the transcript."""

    def __init__(self, transcript: Transcript | None, shown: bool) -> None:
        self._transcript, self._shown = transcript, shown
        self._terminal = sys.stdout.isatty()

    def write(self, text: str) -> None:
        if not text:
            return
        if self._transcript is not None:
            self._transcript.write(text)
        if self._shown:
            parts = (visible(part, keep_newlines=True) for part in text.split("\t"))
            print("\t".join(parts) if self._terminal else text, end="", flush=True)

    def with_turns(self, turns: Iterable[str]) -> Iterator[str]:
        """The same turns, each written to the transcript too; on the terminal they stand already."""
        for words in turns:
            if self._transcript is not None:
                self._transcript.write(f"> {words}\n\n")
            yield words


def turns() -> Iterator[str]:
    """What the user says: a line of stdin each, empty ones left out, until its end."""
    for line in _typed() if sys.stdin.isatty() else sys.stdin:
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
