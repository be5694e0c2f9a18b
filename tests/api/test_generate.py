"""`streamh2o.generate` gives the characters and figures of the command."""

import json

import pytest

import streamh2o as package
from streamh2o.errors import UsageError, UserError
from tests.tiny_folder import TEXT

SMALL = {"cache": 48, "chunk": 16, "dtype": "float32", "device": "cpu", "kernel": "torch", "threads": 1}
CLOCK = ("seconds", "tokens_per_second")


def options(**values):
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]


def lasting(result: dict) -> dict:
    """The result without what only a clock knows."""
    return {name: value for name, value in result.items() if name not in CLOCK}


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT * 5)
    return path


def test_text_and_result_are_those_of_the_command(streamh2o, folder, book, tmp_path):
    how = {"seed": 3, "max_new_tokens": 60, "policy": "h2o", "sinks": 2, "temperature": 0.7}
    heard: list[str] = []
    got = package.generate(book, model=folder, on_text=heard.append, **how, **SMALL)
    result = tmp_path / "result.json"
    arguments = options(model=folder, **how, **SMALL)
    code, out, _ = streamh2o("generate", book, *arguments, "--json", result, "--quiet")
    assert code == 0
    assert got.text == "".join(heard) == out != ""
    assert len(heard) > 10
    assert lasting(got.to_dict()) == lasting(json.loads(result.read_text()))
    assert (got.new_tokens, got.stopped, got.complete) == (60, "max-new-tokens", True)


def test_a_file_its_text_and_its_pieces_are_continued_alike(loaded, book):
    how = {"model": loaded, "seed": 1, "max_new_tokens": 20, **SMALL, "dtype": "auto", "device": "auto"}
    want = package.generate(book, **how)
    text = book.read_text()
    with book.open() as file:
        again = [
            package.generate(file, **how),
            package.generate(prompt=text, **how),
            package.generate((text[at : at + 7] for at in range(0, len(text), 7)), **how),
            package.generate(book, **{**how, "model": (loaded.model, loaded.tokenizer)}),
        ]
    assert [each.text for each in again] == [want.text] * 4
    assert {each.prompt_tokens for each in again} == {want.prompt_tokens}


def test_a_drawn_seed_gives_the_same_text_again(loaded):
    how = {"prompt": TEXT, "model": loaded, "cache": 48, "chunk": 16, "max_new_tokens": 15, "kernel": "torch"}
    first = package.generate(**how)
    assert package.generate(**how, seed=first.sampling["seed"]).text == first.text


def test_a_policy_made_before_is_the_one_of_its_name(loaded):
    how = {"prompt": TEXT, "model": loaded, "chunk": 16, "max_new_tokens": 15, "seed": 1, "kernel": "torch"}
    made = package.make_policy("h2o", cache=40, sinks=2)
    assert package.generate(policy=made, **how).text == package.generate(policy="h2o", cache=40, sinks=2, **how).text


def test_a_text_without_end_stops_where_its_listener_does(loaded):
    heard: list[str] = []

    def listen(piece):
        heard.append(piece)
        if len(heard) == 50:
            raise StopIteration

    how = {"prompt": TEXT, "model": loaded, "cache": 48, "chunk": 16, "kernel": "torch"}
    with pytest.raises(StopIteration):
        package.generate(max_new_tokens=None, on_text=listen, **how)
    assert len(heard) == 50
    assert package.generate(max_new_tokens=3, **how).new_tokens == 3  # the model has been given back


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "prompt="),
        ({"prompt": "a", "input": "b.txt"}, "prompt="),
        ({"prompt": "a", "temperature": -1}, "--temperature is -1"),
        ({"prompt": "a", "max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"prompt": "a", "max_new_tokens": None}, "no end"),
        ({"prompt": "a", "chunk": 0}, "chunk is 0"),
        ({"prompt": "a", "policy": "nope"}, "No policy is called 'nope'"),
        ({"prompt": "a", "tilt": 3}, "no knob 'tilt'"),
        ({"prompt": "a", "bos": "perhaps"}, "bos"),
    ],
)
def test_what_cannot_work_is_a_usage_error(loaded, how, words):
    with pytest.raises(UsageError, match=words):
        package.generate(model=loaded, kernel="torch", **{"cache": 48, **how})


def test_an_empty_text_is_refused(loaded):
    with pytest.raises(UserError, match="is empty"):
        package.generate(prompt="", model=loaded, cache=48, kernel="torch")
