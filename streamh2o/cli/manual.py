"""How a command's `--help` looks: plain text, options in groups, examples at the end."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


def make_app(**settings: Any) -> typer.Typer:
    """A Typer app for one command's file. Plain text needs no rich, so that help comes at once."""
    settings.setdefault("rich_markup_mode", None)
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **settings)


class ManualCommand(TyperCommand):
    """A command whose help groups its options by `rich_help_panel`, in the order in which they are declared."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                title = getattr(parameter, "rich_help_panel", None) or ("Arguments" if argument else "Other options")
                groups.setdefault(title, []).append(record)
        for title, records in sorted(groups.items(), key=lambda group: group[0] == "Other options"):
            with formatter.section(title):
                formatter.write_dl(records, col_max=32)
