"""Writes docs/reference/commands.md from every command's `--help`: `python -m tests.docs.commands_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from streamh2o.cli.main import app

TARGET = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
WIDTH = 80  # columns of the help, whatever the terminal

ABOVE = """\
# Commands

<!-- Made by `python -m tests.docs.commands_page` from the commands themselves; do not edit. -->
<!-- typer {typer} -->

This is what `--help` prints for each command. Results go to stdout, progress and messages to stderr.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | bad usage |
| 130 | interrupted; what was finished is reported and saved |
"""


def page() -> str:
    sections = [ABOVE.format(typer=typer.__version__)]
    for name, text in helps(typer.main.get_command(app), "streamh2o", None):
        sections.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """The full name of `command` and what its `--help` prints, then those of the commands below it."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH)
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from helps(command.get_command(context, below), below, context)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
