"""Answers of the real model: few tokens, so that it takes seconds."""

from pathlib import Path

import pytest

from streamh2o.ask.answer_run import answer_questions
from streamh2o.ask.needle.evaluate import holds
from streamh2o.ask.needle.facts import make_facts, plant
from streamh2o.runs.options import RunOptions
from streamh2o.text.sources import open_inputs

SAMPLE = Path(__file__).parents[2] / "data" / "sample.txt"


@pytest.fixture(scope="module")
def answers(loaded, tmp_path_factory):
    facts = make_facts(6, 77)
    planted = plant(SAMPLE.read_bytes()[:4000], [fact.said for fact in facts[:4]], [0.1, 0.4, 0.6, 0.9])
    path = tmp_path_factory.mktemp("text") / "planted.txt"
    path.write_bytes(planted.text)
    asked = [fact.question for fact in facts]
    given = answer_questions(loaded, open_inputs([path])[0], asked, options=RunOptions(chunk=256))
    return facts, planted, given.answers


def test_what_the_text_says_is_answered_from_where_it_says_it(answers):
    facts, planted, given = answers
    for fact, answer, (start, end) in zip(facts, given, planted.places, strict=False):
        assert holds(answer.answer, fact.key), (fact, answer)
        assert answer.found, answer
        assert answer.evidence[0].start < end
        assert start < answer.evidence[0].end


def test_what_the_text_does_not_say_is_not_found(answers):
    _, _, given = answers
    assert [answer.found for answer in given[4:]] == [False, False]
