"""The display on stderr while a run goes on: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from streamh2o.runs.progress import Display, Progress
from streamh2o.terminal import count, decimal, duration, size
from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_BAR = 40  # columns


class PlainLines(Display):
    """One line every few seconds, for logs and pipes."""

    def __init__(self, file: TextIO, every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._every, self._clock = file, every, clock
        self._next = 0.0
        self._label = ""

    def begin(self, name: str, number: int = 1, of: int = 1) -> None:
        self._label = visible(name) + (f" ({number} of {of})" if of > 1 else "")
        self._next = self._clock() + self._every

    def __call__(self, progress: Progress) -> None:
        now = self._clock()
        if now >= self._next:
            self._next = now + self._every
            self._print(f"{self._label}: {line(progress)}")

    def note(self, text: str) -> None:
        self._print(visible(text))

    def _print(self, text: str) -> None:
        # Nobody listening on stderr is no reason to lose the run.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._file, flush=True)


class LiveLines(Display):
    """A few lines redrawn in place, at most eight times a second."""

    def __init__(self, console: Console, every: float = 0.125) -> None:
        self._console, self._every = console, every
        self._live: Live | None = None
        self._next = 0.0
        self._label = ""

    def begin(self, name: str, number: int = 1, of: int = 1) -> None:
        from rich.live import Live
        from rich.text import Text

        self.end()
        self._label = visible(name) + (f" ({number} of {of})" if of > 1 else "")
        self._next = 0.0
        self._live = Live(
            Text(f"{self._label}: reading", no_wrap=True, overflow="ellipsis"),
            console=self._console,
            auto_refresh=False,  # no thread of its own, so a signal never meets it half-way
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)
        self._console.show_cursor(True)  # a second Ctrl-C ends the process where it is; leave the terminal usable

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._live is not None and now >= self._next:
            self._next = now + self._every
            self._live.update(frame(self._label, progress), refresh=True)

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(visible(text)))

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def make_display(quiet: bool = False, file: TextIO | None = None) -> Display:
    """The display that fits `file` (stderr): none if `quiet`, redrawn on a terminal, plain lines elsewhere."""
    file = file or sys.stderr
    if quiet:
        return Display()
    if file.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console

        return LiveLines(Console(file=file))
    return PlainLines(file)


def time_left(progress: Progress) -> str:
    """How long the rest will take at the pace so far; "" where the size is unknown."""
    if not progress.fraction:
        return ""
    return f"{duration(progress.seconds * (1 - progress.fraction) / progress.fraction)} left"


def holds(progress: Progress) -> str:
    """What the cache holds: "512 of 512 slots: 4 sinks, 128 hitters, 380 recent"."""
    if not progress.composition:
        return f"windows of {count(progress.budget)} tokens"
    parts = ", ".join(f"{count(slots)} {kind}" for kind, slots in progress.composition.items())
    return f"{count(progress.slots)} of {count(progress.budget)} slots: {parts}"


def line(progress: Progress) -> str:
    """Where a run stands, on one line."""
    percent = "" if progress.fraction is None else f"{progress.fraction:.1%}, "
    left = time_left(progress)
    ppl = (
        ""
        if progress.ppl is None
        else f"ppl {decimal(progress.ppl)} (last {count(progress.window)}: {decimal(progress.ppl_window)}), "
    )
    return (
        f"{percent}{count(progress.token)} tokens, {decimal(progress.tokens_per_second, 0)}/s, {ppl}"
        f"{holds(progress)}, memory {size(progress.rss_bytes)}, {left or duration(progress.seconds)}"
    )


def frame(label: str, progress: Progress) -> RenderableType:
    """Where a run stands, as a bar and a line for each of speed, perplexity, cache and memory."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def row(*parts: tuple[str, str] | str) -> Text:
        return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

    rows: list[RenderableType] = [row((label, "bold"))]
    if progress.fraction is not None:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=1.0, completed=progress.fraction, width=_BAR),
            Text(f"{progress.fraction:6.1%}", no_wrap=True),
            Text(time_left(progress), no_wrap=True),
        )
        rows.append(bar)
    rows.append(
        row(
            ("tokens  ", "dim"),
            f"{count(progress.token)} at {decimal(progress.tokens_per_second, 0)}/s, {duration(progress.seconds)}",
        )
    )
    if progress.ppl is not None:
        rows.append(
            row(
                ("ppl     ", "dim"),
                (decimal(progress.ppl), "bold"),
                f", last {count(progress.window)} tokens {decimal(progress.ppl_window)}",
            )
        )
    rows += [
        row(("cache   ", "dim"), holds(progress)),
        row(("memory  ", "dim"), size(progress.rss_bytes)),
    ]
    return Group(*rows)
