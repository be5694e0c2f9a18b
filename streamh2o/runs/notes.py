"""What a user should know of an input, before it is read and at its end."""

from __future__ import annotations

from typing import Any, Protocol

from streamh2o.runs.progress import Display
from streamh2o.text import Source


class _Reading(Protocol):
    """A reader, or what replays one."""

    @property
    def exact(self) -> bool: ...


def note_start(display: Display, source: Source, reader: _Reading) -> None:
    """Say what the ids of `source` may lack."""
    if not reader.exact:
        display.note(
            f"{source.name}: this tokenizer is of an unknown kind, so the ids may differ in a few places from those of "
            "tokenising the whole text at once."
        )


def note_end(display: Display, source: Source, result: dict[str, Any]) -> None:
    """Say what is unexpected in the result of `source`."""
    name, size = source.name, result["input"]["bytes"]
    if source.size and size > source.size:
        display.note(f"{name}: grew from {source.size} bytes to {size} while it was read.")
    if result["complete"] and result["tokens"] == 0:
        display.note(f"{name}: is empty, so nothing was scored.")
    elif result["complete"] and result["scored"] == 0:
        display.note(f"{name}: has one token, and nothing before it to predict it from; nothing was scored.")
