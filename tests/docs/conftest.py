"""A tiny random model, and small texts of the names that the pages and examples use."""

from __future__ import annotations

import gzip
import importlib
import json
import shutil

import pytest

from tests.docs.blocks import ROOT
from tests.tiny_folder import TEXT, make_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of random numbers with room for the caches that the guides name."""
    return make_folder(tmp_path_factory.mktemp("model"), positions=8192)


@pytest.fixture
def place(tmp_path, monkeypatch, tiny):
    """A folder with the small texts, as the working directory."""
    sample = (ROOT / "data" / "sample.txt").read_text("utf-8")
    book = sample[:2500] + "".join(f"{number}. {TEXT}" for number in range(6))
    for name in ("book.txt", "other.txt", "contract.txt", "data/sample.txt", "books/one.txt", "books/two.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(book, "utf-8")
    (tmp_path / "questions.txt").write_text("Who told him about the gull?\nWhere does Corran stand?\n")
    (tmp_path / "mail.gz").write_bytes(gzip.compress(book.encode()))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.jsonl").write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(3)))
    shutil.copytree(tiny, tmp_path / "models" / "my-llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_policy(monkeypatch):
    """The policy of examples/own_policy, as if its package were installed."""
    from streamh2o.policies import POLICIES

    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_policy"))
    module = importlib.import_module("neighbours")
    monkeypatch.setitem(POLICIES, "neighbours", module.Neighbours)
