"""Where sentences begin and end, in bytes. So a passage is not cut inside a sentence or a character."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

# A full stop, question or exclamation mark with the quotes and brackets that close after it, before white space; an
# empty line; the full stops of Chinese and Japanese.
_END = re.compile(
    rb"[.!?]+(?:[\"')\]*_]|\xe2\x80[\x99\x9d])*(?=\s)|\r?\n[ \t]*\r?\n|(?:\xe3\x80\x82|\xef\xbc\x81|\xef\xbc\x9f)"
)
_TITLE = re.compile(rb"(?:^|[\s\"'(\x9c\x98])(?:Mr|Mrs|Ms|Dr|St|Prof|Capt|Col|Gen|Rev|Hon|No|vs|[A-Z])$")
_SPACE = re.compile(rb"\s+")
LONGEST = 400  # bytes; what has no sentences (lists, logs, code) is cut at lines, then at spaces
SHORTEST = 24  # bytes; less ("Yes.") says nothing alone and is joined to what follows


def sentences(data: bytes, shortest: int = SHORTEST) -> list[tuple[int, int]]:
    """Spans (start, end) of `data` that hold one sentence each, without the white space around it, in order.

    Spans are up to LONGEST bytes long, never cut inside a UTF-8 character, and leave out white space only. shortest:
    bytes; a sentence of less is joined to the next.
    """
    cuts = [0]
    for match in _END.finditer(data):
        if match.group() == b"." and _TITLE.search(data, max(0, match.start() - 6), match.start()):
            continue
        if match.end() - cuts[-1] >= shortest or not data[cuts[-1] : match.end()].strip():
            cuts.append(match.end())
    cuts.append(len(data))
    spans: list[tuple[int, int]] = []
    for start, end in pairwise(cuts):
        spans.extend(_pieces(data, start, end))
    return spans


def _pieces(data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    if end - start > LONGEST and _are_records(data[start:end]):
        lines = [start, *(match.end() for match in re.compile(rb"\n").finditer(data, start, end)), end]
        return [piece for a, b in pairwise(lines) for piece in _short_pieces(data, a, b)]
    return _short_pieces(data, start, end)


def _are_records(data: bytes) -> bool:
    """Whether each line is a record (a list, a log, a table), and not a part of a sentence in running text.

    A line of prose is broken where the next word would not have fitted, or, in verse, is short.
    """
    lines = [line for line in (line.rstrip() for line in data.splitlines()) if line]
    if len(lines) < 3:
        return False
    ending, times = Counter(line[-1:] for line in lines).most_common(1)[0]
    if not ending.isalnum() and times >= 0.8 * len(lines):
        return True
    widest = max(map(len, lines))
    forced = sum(len(line) + 1 + len(after.split(None, 1)[0]) > widest for line, after in pairwise(lines))
    return 2 * forced < len(lines) - 1


def _short_pieces(data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    pieces = []
    while (span := _stripped(data, start, end)) is not None:
        start, stop = span
        if stop - start > LONGEST:
            stop = _cut(data, start)
            span = _stripped(data, start, stop)
            assert span is not None
        pieces.append(span)
        start = stop
    return pieces


def _stripped(data: bytes, start: int, end: int) -> tuple[int, int] | None:
    part = data[start:end]
    left = len(part) - len(part.lstrip())
    return (start + left, start + len(part.rstrip())) if left < len(part) else None


def _cut(data: bytes, start: int) -> int:
    """Where to cut a piece that is too long: after its last line, word or at least character."""
    limit = start + LONGEST
    for separator in (b"\n", b" "):
        place = data.rfind(separator, start + SHORTEST, limit)
        if place > start:
            return place + 1
    while limit > start + 1 and data[limit] & 0xC0 == 0x80:
        limit -= 1
    return limit


def whole_characters(data: bytes) -> tuple[int, int]:
    """The part (start, end) of `data` that neither begins nor ends inside a UTF-8 character."""
    start, end = 0, len(data)
    while start < min(3, end) and data[start] & 0xC0 == 0x80:
        start += 1
    for back in range(1, min(4, end - start) + 1):
        byte = data[end - back]
        if byte & 0xC0 != 0x80:  # the first byte of the last character
            need = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (start, end) if need <= back else (start, end - back)
    return start, end


def squeezed(data: bytes) -> str:
    """`data` as text on one line, for a prompt. The line breaks of a printed page do not belong to the sentence."""
    return _SPACE.sub(b" ", data).strip().decode("utf-8", "replace")
