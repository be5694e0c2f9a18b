"""The needle evaluation as a command, with a small random model: what must hold whatever the model knows."""

import json

import pytest

from streamh2o.ask.needle import evaluate as needle
from streamh2o.ask.needle.evaluate import holds
from tests.call import one_sentence
from tests.tiny_folder import TEXT


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT * 60)
    return path


SMALL = ("--chunk", 64, "--dtype", "float32", "--threads", 1, "--quiet", "--per-depth", 1, "--absent", 1)


def test_a_finished_cell_is_not_run_again_and_gives_the_same_table(streamh2o, folder, book, tmp_path, monkeypatch):
    arguments = (book, "--model", folder, "--lengths", "300", "--depths", "20,80", "--policy", "answer", *SMALL)
    arguments += ("--cache", 448, "--out", tmp_path / "out", "--json", tmp_path / "all.json")
    code, first, err = streamh2o("needle", *arguments)
    assert (code, err) == (0, "")
    monkeypatch.setattr(needle, "_run_cell", None)
    assert streamh2o("needle", *arguments) == (0, first, "")
    document = json.loads((tmp_path / "all.json").read_text())
    (row,), (cell,) = document["summary"], document["cells"]
    assert (row["answered"][1], row["placed"][1], row["refused"][1]) == (2, 2, 1)
    assert [outcome["depth"] for outcome in cell["outcomes"]] == [0.2, 0.8, None]
    assert cell["tokens"] >= 300
    assert (tmp_path / "out" / "needle.png").read_bytes().startswith(b"\x89PNG")


def test_policies_are_asked_from_their_cache_and_full_only_where_it_fits(streamh2o, folder, book, tmp_path):
    arguments = ("--model", folder, "--lengths", "100,600", "--depths", "50", "--policy", "h2o,streamingllm,full")
    code, out, _ = streamh2o("needle", book, *arguments, *SMALL, "--cache", 64, "--out", tmp_path, "--json", "-")
    assert code == 0
    cells = json.loads(out)["cells"]
    assert [(cell["length"], cell["method"]) for cell in cells] == [
        (100, "h2o"),
        (100, "streamingllm"),
        (100, "full"),
        (600, "h2o"),
        (600, "streamingllm"),
    ]
    assert all(len(cell["outcomes"]) == 1 and cell["outcomes"][0]["found"] is None for cell in cells)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--policy", "recompute"), 2, "keeps nothing"),
        (("--policy", "nonsense"), 2, "nonsense"),
        (("--lengths", "many"), 2, "--lengths many"),
        (("--depths", "120"), 2, "--depths 120"),
        (("--lengths", "99999"), 1, "fewer than 99,999"),
        (("--haystack", "x.txt"), 2, "--task"),
        (("--policy", "h2o", "--cache", "400", "--lengths", "100"), 2, "lower --cache"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(streamh2o, folder, book, tmp_path, arguments, code, words):
    settings = {"--lengths": "100", "--cache": "64", "--policy": "h2o"}
    settings |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    options = [part for pair in settings.items() for part in pair]
    got, out, err = streamh2o("needle", book, "--model", folder, "--out", tmp_path / "out", *SMALL, *options)
    assert (got, out) == (code, "")
    assert words in one_sentence(err)


def test_a_key_counts_as_whole_words_in_their_order():
    assert holds("It was on the 4th of NOVEMBER.", "November")
    assert holds('"bb3b-5f" it is', "bb3b-5f")
    assert not holds("in 1951", "51")
    assert not holds("of November, 4th", "4th of November")
