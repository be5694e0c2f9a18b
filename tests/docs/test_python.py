"""The Python of README, the first page and the guides runs, and so do the examples: with a tiny random model.

The blocks of a page share their names, as somebody would type them one after another. Texts are small, and less is
written. What they print is not compared.
"""

from __future__ import annotations

import io

import pytest
import transformers
from packaging.version import Version

import streamh2o
from streamh2o.policies import POLICIES
from tests.docs.blocks import ROOT, blocks

FUNCTIONS = ("perplexity", "compare", "answer", "generate", "inspect")
PAGES = sorted({block.page for block in blocks("python")})
EXAMPLES = {"book.py": "", "pipe.py": "", "question.py": "", "generate.py": "", "chat.py": "Why is the sky blue?\n\n"}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture
def small(monkeypatch, place, tiny):
    """A function that makes source small; the functions of the package take the tiny model where none is named."""
    for name in FUNCTIONS:
        monkeypatch.setitem(getattr(streamh2o, name).__kwdefaults__, "model", str(tiny))
    monkeypatch.setattr("sys.argv", ["example.py", "book.txt", "Who told him about the gull?"])

    def make(source: str) -> str:
        source = source.replace('"smollm2-135m"', repr(str(tiny))).replace("10_000", "20").replace("=300", "=20")
        if Version(transformers.__version__) < Version("5.23"):
            source = source.replace("cache=cache,", "past_key_values=cache,")
        return source

    return make


@pytest.fixture
def policies(monkeypatch):
    """What a page registers is gone after it."""
    for name in POLICIES:
        monkeypatch.setitem(POLICIES, name, POLICIES[name])
    yield
    POLICIES.pop("neighbours", None)


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, small):
    names = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page == page:
            source = "\n" * block.line + small(block.text)
            exec(compile(source, block.page, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, small, place, monkeypatch, capsys):
    loaded = streamh2o.load_model(str(place / "models" / "my-llama"))
    loaded.tokenizer.chat_template = CHAT
    monkeypatch.setattr("streamh2o.models.load.load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("sys.stdin", io.StringIO(EXAMPLES[example] or (place / "book.txt").read_text("utf-8")))
    source = small((ROOT / "examples" / example).read_text("utf-8"))
    exec(compile(source, example, "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_every_example_is_tried():
    assert set(EXAMPLES) == {path.name for path in (ROOT / "examples").glob("*.py")}
