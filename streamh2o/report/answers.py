"""Answers for people, each with the passages it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamh2o.terminal import safe_text
from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from streamh2o.ask.answer import Answer


def render_answers(answers: Sequence[Answer], names: Sequence[str] = ()) -> RenderableType:
    """The question (or the name of the field), the answer, and a line per passage with the answer's words marked."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    rows: list[RenderableType] = []
    for title, each in zip(names or [each.question for each in answers], answers, strict=False):
        if rows:
            rows.append(Text(""))
        rows.append(safe_text(title, "bold"))
        answer = safe_text(each.answer or "(no answer)", "green" if each.found else "yellow")
        lines = [Text.assemble(answer, (f"  ({verdict(each)})", "dim"))]
        for number, passage in enumerate(each.evidence):
            quote = safe_text(one_line(passage.quote), "dim" if number else "")
            if each.found and each.answer:
                quote.highlight_words([visible(each.answer)], "reverse", case_sensitive=False)
            lines.append(Text.assemble((f"line {passage.line}: ", "cyan"), quote))
        rows += [Padding(line, (0, 0, 0, 2), expand=False) for line in lines]
    return Group(*rows)


def verdict(answer: Answer) -> str:
    """How sure the answer is, in words."""
    return f"confidence {answer.confidence:.2f}" + ("" if answer.found else ", so probably not in the text")


def one_line(text: str) -> str:
    """The text of a passage on one line; spaces inside a line stay as they are."""
    return " ".join(text.split()) if "\n" in text else text
