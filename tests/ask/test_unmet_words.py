"""What a passage leaves unexpected of a question: a name or a thing that it lacks, and not how the question is put."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.ask.unmet_words import ASIDE, InnerWord, inner_words, unmet
from streamh2o.models.load import load_model
from streamh2o.models.prompts import Prompter
from tests.tiny_folder import make_folder


@pytest.fixture(scope="module")
def prompter(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("model"))
    return Prompter(load_model(str(folder), dtype="float32", device="cpu").tokenizer)


def test_words_that_begin_a_sentence_are_left_out_and_a_title_begins_none(prompter):
    question = " Tell me: where was Dr. \u00dcnchdale born? I need it. O\u00f9?"
    words = [each.word for each in inner_words(prompter, question)]
    assert words == ["me", "where", "was", "dr", "\u00fcnchdale", "born", "need", "it"]


def test_what_stands_beside_a_question_counts_less_but_all_counts_where_nothing_is_asked(prompter):
    shares = {each.word: each.share for each in inner_words(prompter, "Who was he? I need a name.")}
    assert shares == {"was": 1, "he": 1, "need": ASIDE, "a": ASIDE, "name": ASIDE}
    assert {each.share for each in inner_words(prompter, "Name the man. I need it.")} == {1}


@settings(max_examples=40, deadline=None)
@given(st.text("abc1 .?", max_size=30).map(lambda text: f"Who {text}"))
def test_a_word_has_the_ids_that_spell_it(prompter, question):
    ids = prompter.question(question)
    assert len(prompter.question_stops(question)) == len(ids)
    for each in inner_words(prompter, question):
        assert each.ids == tuple(range(each.ids[0], each.ids[-1] + 1))
        spelt = "".join(prompter.decode([ids[n]]) for n in each.ids)
        assert each.word in spelt.casefold()


def test_the_ids_of_words_do_not_overlap_and_bytes_that_are_not_utf_8_are_words_too(prompter):
    question = "Who is M\udcffller the b\u00e4r?"
    taken = [n for each in inner_words(prompter, question) for n in each.ids]
    assert taken == sorted(set(taken))
    assert max(taken) < len(prompter.question(question))


def test_only_the_worst_word_that_the_text_lacks_counts():
    words = [InnerWord("tall", (1,)), InnerWord("is", (2,)), InnerWord("mill", (3, 4)), InnerWord("need", (5,), 0.5)]
    alone = np.array([9, 7, 1, 8, 9, 6], np.float32)
    after = np.array([9, 6, 1, 8, 7, 9], np.float32)
    assert unmet(words, alone, after, "It rains.") == 15
    assert unmet(words, alone, after, "The Mill is here.") == 6
    assert unmet(words, alone, after, "The mill is tall.") == 3  # no more than without any text
    assert unmet(words, alone, after, "They need a tall mill: it is.") == 0
    assert unmet([], alone, after, "") == 0
