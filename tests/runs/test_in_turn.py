"""Inputs in turn: a failure of any of them, or of what takes their chunks, leaves what was finished."""

import pytest

from streamh2o.errors import UserError
from streamh2o.policies import make_policy
from streamh2o.runs.in_turn import InTurn
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Display
from streamh2o.runs.run_files import RunFiles
from streamh2o.runs.score_inputs import score_inputs
from streamh2o.text import open_inputs
from tests.tiny_folder import TEXT


class Shown(Display):
    """Collects what is shown; fails at a chunk of the input called `fails_at`."""

    def __init__(self, fails_at=None):
        self.began, self.notes, self.fails_at = [], [], fails_at

    def begin(self, name, number=1, of=1):
        self.began.append((name.rpartition("/")[2], number, of))

    def note(self, text):
        self.notes.append(text.rpartition("/")[2])

    def __call__(self, progress):
        if self.fails_at is not None and progress.name.endswith(self.fails_at) and progress.token > 40:
            raise UserError("the log can't be written")


@pytest.fixture
def score(loaded, tmp_path):
    def run(texts, display):
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_bytes(text)
        sources = open_inputs([tmp_path / f"{number}.txt" for number in range(len(texts))])
        policy, options = make_policy("h2o", 32), RunOptions(chunk=16)
        runs = InTurn(sources, lambda source, _: PerplexityRun(loaded, source, policy, options), display)
        with RunFiles(sources) as files:
            return score_inputs(runs, files, display)

    return run


def test_all_inputs_have_a_result_and_an_empty_one_a_note(score):
    display = Shown()
    scored = score([TEXT.encode() * 2, b"", TEXT.encode()], display)
    assert [result["complete"] for result in scored.results] == [True] * 3
    assert scored.failure is None
    assert display.began == [("0.txt", 1, 3), ("1.txt", 2, 3), ("2.txt", 3, 3)]
    assert display.notes == ["1.txt: is empty, so nothing was scored."]


def test_an_input_that_fails_ends_the_run_and_keeps_what_was_scored(score):
    scored = score([TEXT.encode(), TEXT.encode() * 300 + b"\xff", TEXT.encode()], Shown())
    assert "not UTF-8" in str(scored.failure)
    assert [result["complete"] for result in scored.results] == [True, False]
    assert score([b"\xff"], Shown()).results == []


def test_a_failure_of_what_takes_the_chunks_keeps_them_too(score):
    scored = score([TEXT.encode(), TEXT.encode() * 9], Shown(fails_at="1.txt"))
    assert str(scored.failure) == "the log can't be written"
    assert [(result["complete"], result["tokens"]) for result in scored.results[1:]] == [(False, 48)]
