"""A record filled from a text: a name and a description each, and the answers as its values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamh2o.ask.answer import Answer
from streamh2o.errors import UsageError, UserError

_FIELD = re.compile(r"\s*([^\s=]+)\s*=\s*(\S.*)")


@dataclass(frozen=True)
class Field:
    """name: as in the record. description: a question, or what it is ("the name of the ship")."""

    name: str
    description: str

    @property
    def question(self) -> str:
        """The description as a question."""
        text = self.description.strip()
        return text if text.endswith("?") else f"What is {text.rstrip('.')}?"


def read_fields(given: Sequence[str]) -> list[Field]:
    """The fields of `--extract`: pairs `name=description`, or files with such a pair on each line.

    Raises UsageError for what is neither, and for a name given twice; UserError for a file that can't be read.
    """
    lines: list[str] = []
    for each in given:
        if _FIELD.fullmatch(each):
            lines.append(each)
            continue
        try:
            lines += Path(each).read_text("utf-8-sig").splitlines()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"--extract {each}: is no name=description, and no file to read ({reason}).") from None
        except UnicodeDecodeError:
            raise UserError(f"--extract {each}: is not UTF-8; convert it first.") from None
    fields: dict[str, Field] = {}
    for line in filter(str.strip, lines):
        match = _FIELD.fullmatch(line)
        if match is None:
            raise UsageError(f"--extract: {line.strip()[:60]!r} is no field; write name=description.")
        if match[1] in fields:
            raise UsageError(f"--extract: the field {match[1]} is given twice; name it once.")
        fields[match[1]] = Field(match[1], match[2].strip())
    if not fields:
        raise UsageError("--extract: there is no field; write name=description, or name a file of such lines.")
    return list(fields.values())


def record(fields: Sequence[Field], answers: Sequence[Answer]) -> dict[str, Any]:
    """What `--json` prints: the record, null where the text does not say it, and each field with its evidence."""
    pairs = list(zip(fields, answers, strict=False))
    return {
        "record": {field.name: answer.answer if answer.found else None for field, answer in pairs},
        "fields": {field.name: answer.to_dict() for field, answer in pairs},
    }
