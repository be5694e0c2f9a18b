"""`streamh2o.inspect` gives what the command prints, and its page."""

import json

import pytest

import streamh2o as package
from streamh2o.errors import UserError
from tests.tiny_folder import TEXT, make_book

SPEED = {"seconds", "tokens_per_second", "peak_rss_bytes"}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("text"))


def lasting(result):
    return {name: value for name, value in result.items() if name not in SPEED}


def test_it_is_what_the_command_prints_and_its_page(streamh2o, folder, book, tmp_path):
    machine = ("--model", folder, "--dtype", "float32", "--device", "cpu", "--threads", 1, "--kernel", "torch")
    asked = ("--policy", "h2o", "--cache", 48, "--recent", 20, "--chunk", 32, "--out", tmp_path / "page.html")
    code, out, _ = streamh2o("inspect", book, *machine, *asked, "--quiet", "--json", "-")
    assert code == 0
    place = {"dtype": "float32", "device": "cpu", "threads": 1, "kernel": "torch"}
    found = package.inspect(book, model=folder, policy="h2o", cache=48, recent=20, chunk=32, **place)
    assert lasting(found.to_dict()) == lasting(json.loads(out))
    assert found.failure is None
    found.save(tmp_path / "mine.html")
    theirs = (tmp_path / "page.html").read_text()
    mine = (tmp_path / "mine.html").read_text()
    assert mine.startswith("<!DOCTYPE html>") == theirs.startswith("<!DOCTYPE html>")
    assert abs(len(mine) - len(theirs)) < 100  # the speed may have other digits
    assert "h2o" in str(found)


def test_pieces_are_read_again_for_their_words(loaded, book):
    how = {"model": loaded, "cache": 48, "chunk": 32, "kernel": "torch"}
    whole = package.inspect(book, **how).to_dict()["kept"]
    assert package.inspect(iter(book.read_text()), **how).to_dict()["kept"] == whole
    assert package.inspect(text=book.read_text(), **how).to_dict()["kept"] == whole


def test_a_text_that_breaks_off_is_inspected_up_to_there_and_an_empty_one_is_an_error(loaded):
    how = {"model": loaded, "cache": 48, "chunk": 32, "kernel": "torch"}
    found = package.inspect([TEXT * 40, b"\xff"], **how)
    assert "not UTF-8" in str(found.failure)
    assert found.to_dict()["complete"] is False
    with pytest.raises(UserError, match="nothing was read"):
        package.inspect(text="", **how)
