"""Retrieval tasks of others as items: LongEval lines, UUID key-value pairs, bAbI 1."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from streamh2o.errors import UsageError, UserError


@dataclass(frozen=True)
class Item:
    """Lines of text, a question about them, the words that a right answer holds, and the line that says it.

    scattered: lost in a longer text, the lines stand apart, and no other item may stand there (bAbI's people are the
    same ones in every story).
    """

    kind: str
    lines: tuple[str, ...]
    question: str
    key: str
    line: int
    scattered: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def place(self) -> tuple[int, int]:
        """Bytes of `text` at which the line begins and ends."""
        start = sum(len(line.encode()) + 1 for line in self.lines[: self.line])
        return start, start + len(self.lines[self.line].encode())


def _longeval(lines: Iterable[str]) -> Iterator[Item]:
    """Lines "line NAME: REGISTER_CONTENT is <NUMBER>" (LongChat's LongEval); the question is its own."""
    for line in lines:
        item = json.loads(line)
        record, question = item["prompt"].rsplit("\nNow the record is over. ", 1)
        rows = [row for row in record.split("\n") if row]
        right = rows.index(item["correct_line"].strip())
        yield Item("longeval", tuple(rows), question.strip(), str(item["expected_number"]), right)


def _kv(lines: Iterable[str]) -> Iterator[Item]:
    """A JSON object of UUIDs, a pair a line (Lost in the Middle, section 3)."""
    for line in lines:
        item = json.loads(line)
        pairs = item["ordered_kv_records"]
        rows = [f' "{key}": "{value}",' for key, value in pairs]
        rows[0], rows[-1] = "{" + rows[0][1:], rows[-1][:-1] + "}"
        right = next(number for number, (key, _) in enumerate(pairs) if key == item["key"])
        question = f'What is the value of the key "{item["key"]}" in the JSON data?'
        yield Item("kv", ("JSON data:", *rows), question, item["value"], right + 1)


def _babi(lines: Iterable[str]) -> Iterator[Item]:
    """Who is where (bAbI, task 1): the statements of a story so far, and a question after every two of them."""
    said: dict[int, str] = {}
    for line in lines:
        number, text = line.rstrip("\n").split(" ", 1)
        if number == "1":
            said = {}
        if "?" not in text:
            said[int(number)] = text.strip()
            continue
        question, answer, support = (part.strip() for part in text.replace("\t", "|").split("|"))
        yield Item("babi", tuple(said.values()), question, answer, list(said).index(int(support)), scattered=True)


TASKS: dict[str, Callable[[Iterable[str]], Iterator[Item]]] = {"longeval": _longeval, "kv": _kv, "babi": _babi}


def read_items(file: Path, task: str, count: int) -> list[Item]:
    """The first `count` items of a task's file, which may be gzipped.

    Raises UsageError for a task that is not in TASKS, UserError where the file can't be read or is no file of it.
    """
    if task not in TASKS:
        raise UsageError(f"--task {task}: must be one of {', '.join(TASKS)}.")
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            items = list(islice(TASKS[task](lines), count))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{file}: can't be read ({reason.lower()}).") from None
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError, RuntimeError) as error:
        raise UserError(f"{file}: is no file of the task {task} ({type(error).__name__}: {error}).") from None
    if not items:
        raise UserError(f"{file}: holds no item of the task {task}.")
    return items
