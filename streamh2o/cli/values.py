"""What the values of options may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamh2o.errors import UsageError


def one_of(option: str, *values: str) -> Callable[[str | None], str | None]:
    """A callback that lets only `values`, and None, through."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in values:
            raise UsageError(f"{option} {value}: must be {', '.join(values[:-1])} or {values[-1]}.")
        return value

    return check


def at_least(option: str, least: int) -> Callable[[int | None], int | None]:
    """A callback that lets numbers from `least` up, and None, through."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise UsageError(f"{option} is {value}; it must be at least {least}.")
        return value

    return check


def chunk_or_auto(text: str | int) -> int:
    """A number of tokens, 0 for `auto`."""
    if text == "auto":
        return 0
    try:
        chunk = int(text)
    except ValueError:
        raise UsageError(f"--chunk {text}: write a number of tokens, or auto.") from None
    if chunk < 1:
        raise UsageError(f"--chunk is {chunk}; it must be at least 1.")
    return chunk


def listed(text: str, option: str) -> list[str]:
    """What `option` lists with commas between. Raises UsageError where that is nothing."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"{option} {text!r}: names nothing; give one or more, with commas between.")
    return parts


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers that `option` lists, in ascending order, each once. Raises UsageError for anything else."""
    for part in listed(text, option):
        if not part.isdecimal() or int(part) < 1:
            raise UsageError(f"{option} {text}: {part!r} is not a whole number above 0; write 256,512.")
    return sorted({int(part) for part in listed(text, option)})


def folder(option: str) -> Callable[[str | Path], Path]:
    """A parser of a folder's name. An empty one, as of a variable that is not set, would be the folder at hand."""

    def parse(text: str | Path) -> Path:
        if not str(text).strip():
            raise UsageError(f"{option} {str(text)!r}: names no folder; write . for this one.")
        return Path(text)

    return parse
