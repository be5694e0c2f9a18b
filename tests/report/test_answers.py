"""Answers as people see them."""

import io

from streamh2o.ask.answer import Answer, Evidence
from streamh2o.report.answers import render_answers
from streamh2o.terminal import as_text


def test_what_is_shown_cannot_drive_the_terminal():
    from rich.console import Console

    quote = "first\nit was \x1b[31m48213\u202e here"
    answers = [Answer("Who\x07?", "48213\x1b[2J", 0.75, True, (Evidence(0, 5, 3, quote, 1.0),))]
    console = Console(file=io.StringIO(), width=200)
    console.print(render_answers(answers))
    for shown in (as_text(render_answers(answers)), console.file.getvalue()):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\x07" not in shown
        assert "line 3: first it was \\x1b[31m48213\\u202e here" in shown
