"""What the pages say of the code: the reference is what the code gives, and what they name is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re

import pytest
import typer

from streamh2o import __version__
from streamh2o.cli.main import app
from tests.docs import commands_page
from tests.docs.blocks import PAGES, ROOT

ANOTHERS = {"--no-deps", "--include_path", "--tasks", "--model_args", "--output_path", "--log_samples", "--batch_size"}
SCRIPTS = {"--facts", "--bytes", "--minutes", "--steps", "--race", "--tokens", "--limit", "--resume", "--absent"}


def test_the_reference_of_commands_is_what_help_prints():
    written, fresh = commands_page.TARGET.read_text("utf-8"), commands_page.page()
    if f"typer {typer.__version__} -->" not in written:  # another release may lay the same help out otherwise
        written, fresh = (sorted(set(re.findall(r"--[a-z][\w-]*", text))) for text in (written, fresh))
    assert written == fresh, "run: python -m tests.docs.commands_page"


def _options() -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", "".join(text for _, text in _helps())))


def _helps():
    return commands_page.helps(typer.main.get_command(app), "streamh2o", None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_option_that_a_page_names_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text("utf-8")))
    assert not named - _options() - ANOTHERS - SCRIPTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page):
    named = re.findall(r"(?<![\w/.])((?:streamh2o|tests|benchmarks|examples)/[\w/.]+\w)", page.read_text("utf-8"))
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]


def test_every_test_that_the_promises_name_exists():
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named
    assert not {name for name in named if f"def {name}(" not in tests}


def test_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1000


def test_arguments_in_a_docstring_become_a_list_and_prose_stays():
    arguments = import_module_from(ROOT / "docs" / "reference" / "arguments.py")
    names = {"policy", "cache", "chunk"}
    text = "policy, cache: what is\nkept: see `x`. chunk: tokens of a pass. Raises UserError: why."
    listed = "- `policy`, `cache`: what is kept: see `x`.\n- `chunk`: tokens of a pass.\n\nRaises UserError: why."
    assert arguments._laid_out(text, names) == listed
    assert arguments._laid_out("Reads on: policy and all.", names) == "Reads on: policy and all."


def import_module_from(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS_OF_OURS = [path for room in ("benchmarks", "examples", "docs") for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS_OF_OURS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_script_imports_from_the_package_exists(script):
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamh2o"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def test_the_citation_and_the_changelog_name_this_version():
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{__version__}]\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")
