"""`streamh2o.perplexity` gives what the command prints, whatever the text and the model are given as."""

import json

import numpy as np
import pytest

import streamh2o as package
from streamh2o.api.perplexity import PerplexityFailed
from streamh2o.errors import UsageError, UserError
from tests.tiny_folder import TEXT, make_book

SPEED = {"seconds", "tokens_per_second", "peak_rss_bytes"}
SMALL = {"cache": 64, "chunk": 32, "dtype": "float32", "device": "cpu", "threads": 1, "kernel": "torch"}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("text"))


def lasting(result: dict) -> dict:
    """Without what a clock and the machine say, and without the name of the input."""
    kept = {name: value for name, value in result.items() if name not in SPEED}
    return kept | {"input": {name: value for name, value in kept["input"].items() if name != "name"}}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"policy": "h2o", "sinks": 2, "recent": 40},
        {"far": 16, "decay": 0.5, "evict": "token"},
        {"kv_bits": 8, "newline": "lf", "max_tokens": 150, "bos": "no", "errors": "replace"},
    ],
)
def test_it_is_what_the_command_prints(streamh2o, folder, book, tmp_path, how):
    options = [part for name, value in (SMALL | how).items() for part in (f"--{name.replace('_', '-')}", value)]
    code, out, _ = streamh2o("ppl", book, "--model", folder, *options, "--quiet", "--json", "-")
    assert code == 0
    log, losses = tmp_path / "log.jsonl", tmp_path / "losses.npy"
    found = package.perplexity(book, model=folder, log=log, nll_out=losses, **SMALL, **how)
    assert lasting(found.to_dict()) == lasting(json.loads(out))
    assert found.to_dict()["input"]["name"] == str(book)
    assert (found.ppl, found.scored) == (found.to_dict()["ppl"], found.to_dict()["scored"])
    assert np.load(losses).astype(np.float64).sum() == pytest.approx(found.nll_sum, rel=1e-6)
    assert json.loads(log.read_text().splitlines()[-1])["token"] == found.tokens


def test_text_file_and_pieces_give_the_same_numbers(loaded, book):
    how = {"model": loaded, "cache": 64, "chunk": 32, "kernel": "torch"}
    text = book.read_text()
    expected = lasting(package.perplexity(book, **how).to_dict())
    with open(book, "rb") as binary, open(book) as file:
        given = [{"text": text}, {"input": binary}, {"input": file}, {"input": (letter for letter in text)}]
        for each in given:
            assert lasting(package.perplexity(**each, **how).to_dict()) == expected


def test_a_pair_of_model_and_tokenizer_gives_the_losses_of_its_folder(loaded):
    pair = package.perplexity(text=TEXT, model=(loaded.model, loaded.tokenizer), cache=32, chunk=8, kernel="torch")
    named = package.perplexity(text=TEXT, model=loaded, cache=32, chunk=8, kernel="torch")
    assert pair.nll_sum == named.nll_sum


def test_a_policy_made_by_hand_has_its_own_numbers(loaded):
    made = package.make_policy("h2o", cache=32, recent=20)
    found = package.perplexity(text=TEXT, model=loaded, policy=made, chunk=8, kernel="torch").to_dict()
    assert (found["policy"], found["cache"], found["recent"]) == ("h2o", 32, 20)


def test_progress_is_shown_only_if_asked_for(loaded, capfd, monkeypatch):
    how = {"model": loaded, "cache": 32, "chunk": 8, "kernel": "torch"}
    package.perplexity(text="", **how)
    assert capfd.readouterr() == ("", "")
    package.perplexity(text="", progress=True, **how)
    assert "is empty" in capfd.readouterr().err


def test_a_failure_half_way_has_what_came_before(loaded):
    how = {"model": loaded, "cache": 32, "chunk": 8, "kernel": "torch"}
    with pytest.raises(PerplexityFailed, match="not UTF-8") as raised:
        package.perplexity([TEXT * 40, b"\xff"], **how)
    partial = raised.value.partial
    assert partial.scored == partial.tokens - 1 > 0
    assert partial.to_dict()["complete"] is False
    with pytest.raises(UserError) as early:
        package.perplexity([b"\xff"], **how)
    assert not isinstance(early.value, PerplexityFailed)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"policy": "h3o"}, "h3o"),
        ({"bos": "maybe"}, "--bos is 'maybe'; it must be auto, yes or no"),
        ({"newline": "crlf"}, "--newline"),
        ({"errors": "ignore"}, "--errors"),
        ({"evict": "never"}, "--evict"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"threads": 0}, "threads"),
        ({"chunk": 0}, "chunk"),
        ({"wings": 2}, "wings"),
    ],
)
def test_an_option_that_cannot_be_is_named(loaded, how, said):
    with pytest.raises(UsageError, match=said):
        package.perplexity(text=TEXT, model=loaded, kernel="torch", **how)


def test_its_files_do_not_overwrite_the_text(loaded, book):
    before = book.read_bytes()
    with pytest.raises(UsageError, match=r"log .*overwrite an input"):
        package.perplexity(book, model=loaded, log=book)
    assert book.read_bytes() == before
