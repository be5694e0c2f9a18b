"""`streamh2o.compare` gives what the command prints."""

import json

import pytest

import streamh2o as package
from streamh2o.errors import UsageError, UserError
from tests.tiny_folder import TEXT, make_book

SPEED = {"seconds", "tokens_per_second", "peak_rss_bytes"}
HOW = {"caches": [32, 64], "policies": ["h2o:recent=20", "streamingllm"], "chunk": 32}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("text"))


def lasting(found):
    """Without what a clock and the machine say."""
    if isinstance(found, dict):
        return {name: lasting(value) for name, value in found.items() if name not in SPEED}
    return [lasting(value) for value in found] if isinstance(found, list) else found


def test_it_is_what_the_command_prints(streamh2o, folder, book, tmp_path):
    machine = ("--model", folder, "--dtype", "float32", "--device", "cpu", "--threads", 1, "--kernel", "torch")
    asked = ("--cache", "64,32", "--policy", "h2o:recent=20,streamingllm", "--chunk", 32, "--from", 50)
    line = (book, *machine, *asked, "--out", tmp_path / "out", "--against-full", "--quiet", "--json", "-")
    code, out, _ = streamh2o("compare", *line)
    assert code == 0
    place = {"dtype": "float32", "device": "cpu", "threads": 1, "kernel": "torch"}
    found = package.compare(book, model=folder, start=50, against_full=True, **HOW, **place)
    assert lasting(found.to_dict()) == lasting(json.loads(out))
    assert len(found.rows) == 5
    assert "StreamingLLM" in str(found) or "streamingllm" in str(found)


def test_finished_cells_are_taken_from_their_folder(loaded, book, tmp_path):
    how = {"model": loaded, "out": tmp_path, "kernel": "torch", **HOW}
    first = package.compare([book], **how)
    when = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(when) == 8
    assert package.compare([book], **how).to_dict() == first.to_dict()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == when


def test_pieces_and_open_files_are_inputs_and_give_means(loaded, book):
    with open(book, "rb") as file:
        found = package.compare([file, iter(TEXT * 5)], model=loaded, kernel="torch", **HOW)
    assert [row["input"] for row in found.rows[::4]] == [str(book), "input 2"]
    assert len(found.means) == 4


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"policies": "h2o"}, "policies is a list"),
        ({"caches": 512}, "caches is a list"),
        ({"policies": ["h3o"]}, "h3o"),
        ({"start": 10_000}, "--from 10000"),
        ({"caches": [10_000]}, "10000"),
    ],
)
def test_what_does_not_fit_is_named(loaded, book, how, said):
    with pytest.raises(UsageError, match=said):
        package.compare(book, model=loaded, kernel="torch", **(HOW | how))


def test_no_input_and_an_empty_one_are_errors(loaded):
    with pytest.raises(UsageError, match="at least one"):
        package.compare([], model=loaded)
    with pytest.raises(UserError, match="gives 0 tokens"):
        package.compare([[""]], model=loaded, kernel="torch", **HOW)
