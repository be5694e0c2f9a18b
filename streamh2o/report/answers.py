"""Answers for a terminal, each with the passages it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from streamh2o.ask.answer import Answer


def verdict(answer: Answer) -> str:
    """How sure the answer is, in words."""
    return f"confidence {answer.confidence:.2f}" + ("" if answer.found else ", so probably not in the text")


def one_line(text: str) -> str:
    """The text of a passage on one line, nothing of it able to drive the terminal."""
    return visible(" ".join(text.split(" "))) if "\n" not in text else visible(" ".join(text.split()))


def _titles(answers: Sequence[Answer], names: Sequence[str]) -> list[str]:
    return [visible(title) for title in names or [each.question for each in answers]]


def plain(answers: Sequence[Answer], names: Sequence[str] = ()) -> str:
    """For pipes and files: the question (or the name of the field), the answer, and a line per passage."""
    blocks = []
    for title, each in zip(_titles(answers, names), answers, strict=False):
        lines = [title, f"  {visible(each.answer) or '(no answer)'}  ({verdict(each)})"]
        lines += [f"  line {passage.line}: {one_line(passage.quote)}" for passage in each.evidence]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def rich_answers(answers: Sequence[Answer], names: Sequence[str] = ()) -> RenderableType:
    """The same with the passage lit, and in it the words of the answer."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    rows: list[RenderableType] = []
    for title, each in zip(_titles(answers, names), answers, strict=False):
        rows.append(Text(title, style="bold"))
        shown = visible(each.answer) or "(no answer)"
        rows.append(
            Padding(Text.assemble((shown, "green" if each.found else "yellow"), (f"  {verdict(each)}", "dim")), (0, 2))
        )
        for number, passage in enumerate(each.evidence):
            quote = Text(one_line(passage.quote), style="" if number == 0 else "dim")
            if each.found and each.answer:
                quote.highlight_words([visible(each.answer)], "reverse", case_sensitive=False)
            rows.append(Padding(Text.assemble((f"line {passage.line}: ", "cyan"), quote), (0, 2)))
        rows.append(Text(""))
    return Group(*rows[:-1])
