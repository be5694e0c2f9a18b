"""The program that fits what confidence weighs: it finds what parts right from wrong, and asks what is not said."""

import importlib
import json
import re

import numpy as np
import pytest

from streamh2o.ask.needle.facts import KINDS, make_facts


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("fit_confidence")


def _rows(count):
    """`count` rows of three features of unlike scales, and which are right: those beyond a plane, with a gap."""
    chance = np.random.default_rng(3)
    plane = np.array([4.0, 2.0, 0.1])
    x = chance.uniform(size=(4 * count, 3)) * [1, 1, 10] - [0, 0, 10]
    beyond = x @ plane - 2.5
    clear = np.flatnonzero(abs(beyond) > 0.2)[:count]
    return x[clear], beyond[clear] > 0, plane


def test_the_weights_part_right_from_wrong_and_point_the_way_that_does(program):
    x, right, plane = _rows(200)
    weights = program.logistic(x, right.astype(float))
    assert ((weights[0] + x @ weights[1:] > 0) == right).all()
    scale = np.abs(x).max(0)  # the ridge weighs features of that scale alike
    found, wanted = weights[1:] * scale, plane * scale
    assert found @ wanted > 0.99 * np.linalg.norm(found) * np.linalg.norm(wanted)


def test_both_outcomes_weigh_alike_however_many_there_are(program):
    x, right, _ = _rows(60)
    twice = np.concatenate([np.arange(len(x)), *[np.flatnonzero(~right)] * 4])
    few, many = (program.logistic(x[of], right[of].astype(float)) for of in (np.arange(len(x)), twice))
    assert few / np.linalg.norm(few) == pytest.approx(many / np.linalg.norm(many), abs=0.02)


def test_fit_prints_weights_and_what_they_part_on_each_book(program, monkeypatch, capsys, tmp_path):
    x, right, _ = _rows(80)
    rows = [
        {"book": number % 2, "kind": "there" if good else "absent", "right": bool(good), "x": list(values)}
        for number, (values, good) in enumerate(zip(x, right, strict=True))
    ]
    rows.append({"book": 0, "kind": "other", "right": False, "x": [0.1, 0.1, float("-inf")]})  # gave no answer
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.argv", ["fit_confidence.py", "fit", str(answers)])
    program.main()
    weights, *books = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"WEIGHTS = \((-?\d+\.\d+, ){3}-?\d+\.\d+\)", weights)
    assert len(books) == 4
    there = sum(row["kind"] == "there" and row["book"] == 1 for row in rows)
    assert f"book 1, fitted on all: there {there}/{there}, other 0/0, absent {40 - there}/{40 - there}" in books


@pytest.mark.parametrize("kind", KINDS)
def test_another_question_can_be_asked_about_whatever_is_planted(program, kind):
    facts = make_facts(3 * len(KINDS[kind]), 7, [kind])
    assert len({re.sub(r"\b[A-Z]\w+", "", fact.question.split(" ", 1)[1]) for fact in facts}) >= len(KINDS[kind])
    for fact in facts:
        other = program.other_question(fact.question)
        names = set(re.findall(r"\b[A-Z]\w+", fact.question.split(" ", 1)[1]))
        assert other != fact.question
        assert other.endswith("?")
        assert "{" not in other
        assert names & set(re.findall(r"\b[A-Z]\w+", other))  # the same person or thing


def test_a_question_of_no_known_form_is_refused(program):
    with pytest.raises(ValueError, match="Is it so"):
        program.other_question("Is it so?")
