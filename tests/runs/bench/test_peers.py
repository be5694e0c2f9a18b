"""Peers that are missing or fail are named and left out; those that run are called once before they are timed."""

import sys
import types

import pytest

from streamh2o.errors import UserError
from streamh2o.runs.bench import peers
from tests import tiny


def test_without_peers_it_is_said_how_to_get_one(monkeypatch):
    for name in ("llama_cpp", "kvpress"):
        monkeypatch.setitem(sys.modules, name, None)  # what makes an import fail
    said = []
    with pytest.raises(UserError, match="pip install llama-cpp-python"):
        peers.contestants("smollm2-135m", tiny.llama(), tiny.tokens(8), 4, said.append)
    assert len(said) == 2
    assert all("is not installed" in line for line in said)


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", types.ModuleType("kvpress"))  # a release without these presses
    monkeypatch.setattr(peers, "_llama_cpp", lambda *_: {"llama.cpp": (8, lambda: calls.append(1))})
    calls, said = [], []
    found = peers.contestants("smollm2-135m", tiny.llama(), tiny.tokens(8), 4, said.append)
    assert list(found) == ["llama.cpp"]
    assert calls == [1]
    (line,) = said
    assert line.startswith("kvpress: AttributeError")


def test_llama_cpp_wants_a_gguf_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    monkeypatch.setitem(sys.modules, "kvpress", None)
    said = []
    with pytest.raises(UserError):
        peers.contestants("some/folder", tiny.llama(), tiny.tokens(8), 4, said.append)
    assert "some/folder is no GGUF file" in said[0]
