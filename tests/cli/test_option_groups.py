from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from streamh2o.cli.option_groups import Without, expand_groups


@dataclass(frozen=True)
class Group:
    size: Annotated[int, typer.Option(help="How large.")] = 3
    name: Annotated[str | None, typer.Option("--called", help="Its name.")] = None
    hidden: Annotated[bool, typer.Option("--hidden")] = False


@pytest.fixture
def invoke():
    app = typer.Typer()

    @app.command()
    @expand_groups
    def command(
        ctx: typer.Context, path: Annotated[str, typer.Argument()], *, group: Annotated[Group, Without("hidden")]
    ) -> None:
        """Says what it was given."""
        source = ctx.get_parameter_source("size")
        print(path, group, source.name)

    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_the_fields_of_a_group_are_options_with_their_defaults_and_help(invoke):
    assert invoke("a").output == "a Group(size=3, name=None, hidden=False) DEFAULT\n"
    assert invoke("a", "--size", "5", "--called", "b").output == "a Group(size=5, name='b', hidden=False) COMMANDLINE\n"
    out = invoke("--help").output
    assert "How large." in out
    assert "Says what it was given." in out


def test_a_field_that_is_left_out_is_no_option(invoke):
    assert "--hidden" not in invoke("--help").output
    assert invoke("a", "--hidden").exit_code == 2
