"""Every command line of the documentation is one that the program takes.

RUN: on README, the first page and the guides each `streamh2o` command is run, with a tiny random model in place of the
real one, on small texts of the names that the page uses. What is shown below a command is not compared.
PARSED: the others (results, notebook, reference, and what `ONLY_PARSED` names) need books, hours or a network. Their
options are parsed by the command itself, so one that is renamed or refuses its value fails here.
What is not `streamh2o` is looked up: a script or test has to exist, a target of make too.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re

import pytest
import typer

from streamh2o.cli.main import app
from tests.docs.blocks import ROOT, Line, blocks, lines, programs

ONLY_PARSED = {
    "streamh2o models get smollm2-135m": "installs a package",
    "streamh2o doctor": "checks the machine, which may be anything",
    "FIVE_BOOKS": "needs five books and hours",
    "jennie-gerhardt.txt": "needs the book",
    "--max-new-tokens 100000": "needs hours",
    "tail -f log.txt": "has no end",
    "--chat": "waits for somebody to type",
    "model.Q4_K_M.gguf": "needs a real GGUF file",
}
SMALLER = {"--max-new-tokens": "20", "--lengths": "300"}
OTHERS = {"cat", "zcat", "head", "tail", "jq", "source", "llama-perplexity", "pre-commit"}
EXAMPLE = re.compile(r"^    (?:\S.*\| )?streamh2o .*$", re.MULTILINE)


def runs(line: Line) -> bool:
    """Whether the line is run, not only parsed."""
    page = line.page in ("README.md", "docs/index.md") or line.page.startswith("docs/guides/")
    ours = any(words[0] == "streamh2o" for words in line.programs)
    return ours and page and not any(part in line.text for part in ONLY_PARSED)


LINES = list(lines())
EXAMPLES = [
    Line(block.page, found[0].strip(), programs(found[0]))
    for block in blocks("text")
    for found in EXAMPLE.finditer(block.text)
]


def command_of(words: tuple[str, ...]):
    """The command that `words`, from `streamh2o` on, call, and what is left for it to parse."""
    command, rest = typer.main.get_command(app), list(words[1:])
    context = command.make_context("streamh2o", [], resilient_parsing=True)
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        command = command.get_command(context, rest[0])
        assert command is not None, f"no command {rest[0]}"
        rest = rest[1:]
    return command, rest


@pytest.mark.parametrize("line", LINES + EXAMPLES, ids=str)
def test_every_command_line_is_understood(line):
    for words in line.programs:
        match words:
            case ("streamh2o", *_):
                command, rest = command_of(words)
                command.make_context(command.name, rest)
            case ("make", *targets):
                for target in targets:
                    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
            case ("python", "-m", "pytest", *rest) | ("pytest", *rest):
                assert all((ROOT / path).is_file() for path in rest if path.startswith("tests/")), rest
            case ("python", "-m", module, *_):
                assert importlib.util.find_spec(module) is not None, module
            case ("python", script, *_):
                assert (ROOT / script).is_file(), script
            case ("pip", "install", *rest):
                assert all((ROOT / path).exists() for path in rest if "/" in path or path.endswith(".txt")), rest
            case (other, *_):
                assert other in OTHERS, other


@pytest.mark.usefixtures("own_policy")
@pytest.mark.parametrize("line", [line for line in LINES if runs(line)], ids=str)
def test_the_commands_of_the_guides_run(line, place, tiny, streamh2o):
    if "--resume" in line.text:
        earlier = Line(line.page, "", programs(line.text.replace(" --resume", "")))
        run(earlier, place, tiny, streamh2o)
    if line.text.startswith("streamh2o plot"):
        run(Line(line.page, "", programs("streamh2o ppl book.txt --log run.jsonl")), place, tiny, streamh2o)
    run(line, place, tiny, streamh2o)


def run(line: Line, place, tiny, streamh2o) -> None:
    """Run the `streamh2o` of a pipe on what the program before it would print."""
    stdin, out = None, ""
    for words in line.programs:
        if words[0] == "streamh2o":
            code, out, err = streamh2o(*smaller(words[1:], tiny), stdin=stdin)
            assert code == 0, err
        elif words[0] == "jq":
            value = json.loads(out)
            for key in words[1].split("."):
                value = value[key] if key else value
        else:
            data = (place / words[-1]).read_bytes()
            stdin = gzip.decompress(data) if words[0] == "zcat" else data


def smaller(words, tiny) -> list[str]:
    """The same command with the tiny model, where none is named, and less to write."""
    words = list(words)
    for option, value in SMALLER.items():
        if option in words:
            words[words.index(option) + 1] = value
    command, _ = command_of(("streamh2o", *words))
    if "--model" not in words and any("--model" in parameter.opts for parameter in command.params):
        words += ["--model", str(tiny)]
    return words
