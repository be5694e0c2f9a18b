"""Lays out a docstring's `name: what it is.` as a list, one item an argument. For mkdocstrings only."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Arguments(griffe.Extension):
    """Knows the arguments from the signature, and a class's from its fields and its `__init__`."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._list(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        names = {parameter.name for parameter in init.parameters} if isinstance(init, griffe.Function) else set()
        self._list(cls, names | {name for name, member in cls.members.items() if member.is_attribute})

    def _list(self, thing: griffe.Object, names: set[str]) -> None:
        if thing.docstring is None:
            return
        paragraphs = thing.docstring.value.split("\n\n")
        thing.docstring.value = "\n\n".join(_laid_out(paragraph, names) for paragraph in paragraphs)


def _laid_out(paragraph: str, names: set[str]) -> str:
    """The paragraph as a list where it begins with arguments; as it is where it does not."""
    if paragraph.startswith((" ", "- ", "```")):
        return paragraph
    text = " ".join(paragraph.split())
    found = [
        match
        for match in re.finditer(r"(?:^|(?<=[.;] ))(?:and )?(\w+(?:, \w+)*): ", text)
        if set(match[1].split(", ")) <= names
    ]
    if not found or found[0].start():
        return paragraph
    ends = [match.start() for match in found[1:]] + [len(text)]
    last, raises, after = text[found[-1].end() :].partition(" Raises ")
    if raises:
        ends[-1] = found[-1].end() + len(last)
    items = []
    for match, end in zip(found, ends, strict=True):
        what = text[match.end() : end].strip().rstrip(";")
        items.append(f"- {', '.join(f'`{name}`' for name in match[1].split(', '))}: {what}")
    return "\n".join(items) + (f"\n\nRaises {after}" if raises else "")
