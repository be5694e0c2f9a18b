"""Ctrl-C and SIGTERM: finish the chunk at hand, then stop; the second one quits at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """Asked to stop while waiting for input."""


class Interrupt:
    """While entered, the first signal sets `requested`, or raises Stopped inside `waiting`.

    After it signals have their default effect, so that a second one ends the process even inside a long computation.
    Enter it in the main thread. Signals that are ignored (`nohup`, a background job) stay so.
    """

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around work that may never end, such as reading a pipe, and that may be cut off anywhere."""
        self._waiting = True
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if self._waiting:
            raise Stopped
