"""Made-up facts, and texts with them planted in."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamh2o.ask.needle.evaluate import holds
from streamh2o.ask.needle.facts import KINDS, make_facts, plant
from streamh2o.ask.needle.tasks import read_items
from streamh2o.ask.needle.trials import fact_trials, task_trials
from streamh2o.errors import UsageError, UserError

PROSE = "It was late. “Who goes there?” cried Mr. Élan, and nobody said a word\r\nfor a long while. So he went. " * 40


@given(st.integers(0, 1000), st.integers(1, 60))
def test_facts_are_about_different_people_and_their_keys_stand_in_what_is_said(seed, count):
    facts = make_facts(count, seed)
    assert facts == make_facts(count, seed)
    assert len({fact.question for fact in facts}) == count
    for fact in facts:
        assert holds(fact.said, fact.key)
        assert not holds(fact.question, fact.key)


def test_only_the_kinds_asked_for_are_made_and_others_are_refused():
    assert [fact.kind for fact in make_facts(5, 1, ["name", "date"])] == ["name", "date", "name", "date", "name"]
    with pytest.raises(UsageError, match=", ".join(KINDS)):
        make_facts(1, 0, ["colour"])
    with pytest.raises(UsageError, match="60 facts"):
        make_facts(61, 0)


@given(
    st.lists(st.tuples(st.text("abé ", min_size=1, max_size=9), st.floats(0, 1)), max_size=8),
    st.integers(0, len(PROSE)),
)
def test_planted_needles_stand_where_it_says_and_taking_them_out_gives_the_text(pairs, size):
    text = PROSE[:size].encode()
    planted = plant(text, [needle for needle, _ in pairs], [depth for _, depth in pairs])
    for (needle, _), (start, end) in zip(pairs, planted.places, strict=True):
        assert planted.text[start:end] == needle.encode()
    left = planted.text
    for start, end in sorted(planted.places, reverse=True):
        assert left[start - 1 : start] == b" "
        left = left[: start - 1] + left[end:]
    assert left == text


def test_a_needle_stands_near_its_depth_and_between_sentences():
    planted = plant(PROSE.encode(), ["NEEDLE."], [0.5])
    ((start, end),) = planted.places
    assert abs(start / len(planted.text) - 0.5) < 0.05
    assert planted.text[:start].decode().rstrip()[-1] in ".?”"
    assert planted.text[end:].decode().lstrip().startswith(("It was", "“Who", "cried", "So he"))


def test_every_length_has_facts_of_its_own_and_questions_about_what_is_not_there():
    kinds = ["number", "name"]
    trials = list(fact_trials([PROSE.encode()] * 2, [500, 600], [0.1, 0.9], per_depth=2, absent=3, kinds=kinds, seed=5))
    assert [len(trial.asked) for trial in trials] == [7, 7]
    assert not {a.question for a in trials[0].asked} & {a.question for a in trials[1].asked}
    for trial in trials:
        assert [asked.depth for asked in trial.asked] == [0.1, 0.9, 0.1, 0.9, None, None, None]
        for asked in trial.asked:
            if asked.start is None:
                assert asked.key.encode() not in trial.text or asked.kind == "number"
            else:
                assert asked.key.encode() in trial.text[asked.start : asked.end]


LONGEVAL = {
    "expected_number": 2416,
    "correct_line": "line b-c: REGISTER_CONTENT is <2416>\n",
    "prompt": "Now the record start:\n\nline a-b: REGISTER_CONTENT is <17>\nline b-c: REGISTER_CONTENT is <2416>\n"
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line b-c? I need the number. ",
}
KV = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k2", "value": "v2"}
BABI = (
    "1 John went to the hall.\n2 Mary went home.\n3 Where is John? |hall|1\n"
    "1 Bo left.\n2 Bo slept.\n3 Who left? |Bo|1\n"
)


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    for name, text in (("longeval", json.dumps(LONGEVAL)), ("kv", json.dumps(KV)), ("babi", BABI)):
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in ("longeval", "kv", "babi")}


@pytest.mark.parametrize(
    ("task", "key", "line"),
    [
        ("longeval", "2416", "line b-c: REGISTER_CONTENT is <2416>"),
        ("kv", "v2", ' "k2": "v2",'),
        ("babi", "hall", "John went to the hall."),
    ],
)
def test_a_tasks_item_has_its_place_alone_and_lost_in_a_text(files, task, key, line):
    items = read_items(files[task], task, 9)
    for trials in (task_trials(items), task_trials(items, PROSE.encode(), 900)):
        trial = next(iter(trials))
        asked = trial.asked[0]
        assert asked.key == key
        assert trial.text[asked.start : asked.end].decode() == line
    if task == "babi":
        assert b"Bo" not in trial.text
        assert trial.text.index(b"John went") + 500 < trial.text.index(b"Mary went")


def test_a_file_of_another_task_is_refused_in_one_sentence(files):
    for task in files:
        other = files["babi" if task != "babi" else "kv"]
        with pytest.raises(UserError, match="is no file of the task"):
            read_items(other, task, 1)
    with pytest.raises(UserError, match="can't be read"):
        read_items(files["kv"].with_name("missing"), "kv", 1)
    with pytest.raises(UsageError, match="longeval, kv, babi"):
        read_items(files["kv"], "riddles", 1)
