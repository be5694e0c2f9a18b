"""The fenced blocks of README, CONTRIBUTING and the site, and the command lines in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. page: its file's path below the root. line: where it begins, from 1."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Line:
    """A command line: the programs of a pipe, each as its words, without what a redirection writes to."""

    page: str
    text: str
    programs: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in _FENCE.finditer(text):
            if found[1] in languages:
                line = text.count("\n", 0, found.start()) + 1
                yield Block(page.relative_to(ROOT).as_posix(), line, found[1], found[2])


def lines() -> Iterator[Line]:
    """Every command line: those after `$ ` of console blocks, and all of bash blocks."""
    for block in blocks("console", "bash"):
        joined = block.text.replace("\\\n", " ")
        for text in joined.splitlines():
            if block.language == "bash" or text.startswith("$ "):
                yield Line(block.page, " ".join(text.removeprefix("$ ").split()), programs(text.removeprefix("$ ")))


def programs(text: str) -> tuple[tuple[str, ...], ...]:
    """The programs of a command line. Comments and the targets of redirections are left out."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    for number in [number for number, word in enumerate(words) if word in (">", "<")][::-1]:
        del words[number : number + 2]
    between = ("|", "&&", ";")
    return tuple(tuple(group) for ends, group in groupby(words, lambda word: word in between) if not ends)
