"""Answers are copied from the text, and records are filled from answers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.ask.answer import Answer
from streamh2o.ask.answer_run import answer_questions
from streamh2o.ask.extract import Field, read_fields, record
from streamh2o.ask.read_passage import Reader, copies, words
from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.models.prompts import Prompter
from streamh2o.runs.options import RunOptions
from streamh2o.text.sources import open_inputs
from tests.tiny_folder import TEXT, make_folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(make_folder(tmp_path_factory.mktemp("model"))), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def reader(loaded):
    return Reader(loaded, Prompter(loaded.tokenizer), cache=448)


@settings(max_examples=30, deadline=None)
@given(st.text("ab1é .\n(", max_size=30))
def test_an_answer_stands_in_the_text_word_for_word(reader, text):
    reading = reader.read(text, "Who?")
    assert reading.answer in text
    assert reading.logprob <= 0
    assert bool(reading.answer) == bool(words(text))


def test_reading_is_the_same_whatever_was_read_before(loaded, reader):
    want = Reader(loaded, Prompter(loaded.tokenizer), cache=448).read(TEXT, "Who jumps?")
    reader.read("Another text. It is longer.", "Why?")
    assert reader.read(TEXT, "Who jumps?") == want


def test_an_answer_is_the_likeliest_of_all_that_can_be_copied(loaded, reader):
    """Against each stretch of words run through the model by itself, with what ends an answer after it."""
    prompter, text, question = Prompter(loaded.tokenizer), "The fox jumps. A dog sleeps here.", "What does the dog do?"
    prompt, ends = prompter.ask(text, question), sorted(prompter.ends())

    def logprob(ids):
        hidden = loaded.model.base_model(input_ids=torch.tensor([prompt + ids])).last_hidden_state[0]
        rows = loaded.model.get_output_embeddings()(hidden[len(prompt) - 1 :]).float().log_softmax(-1)
        return float(rows[range(len(ids)), ids].sum() + rows[-1, ends].logsumexp(-1))

    with torch.inference_mode():
        every = {
            answer: logprob(copy.ids[:number])
            for copy in copies(prompter, text)
            for number, answer in copy.wholes(frozenset(words(question)))
        }
    reading = reader.read(text, question)
    assert reading.logprob == pytest.approx(every[reading.answer], abs=1e-3)
    assert reading.logprob == pytest.approx(max(every.values()), abs=1e-3)


def test_a_copy_ends_after_a_whole_word_and_not_beyond_its_sentence(loaded):
    prompter = Prompter(loaded.tokenizer)
    begun = {
        copy.piece: copy for copy in copies(prompter, "There were 4567 sheep to be counted by him. More came after.")
    }
    assert "after." in begun
    assert begun["sheep to be counted by him."].ids
    answers = [answer for _, answer in begun["4567 sheep to be counted by him."].wholes(frozenset(["4567", "sheep"]))]
    assert answers[0] == "4567 sheep to"
    assert answers[-1] == "4567 sheep to be counted by him."
    assert set(answers[1:-1]) <= {
        "4567 sheep to be",
        "4567 sheep to be counted",
        "4567 sheep to be counted by",
        "4567 sheep to be counted by him",
    }


def test_answers_so_far_come_while_the_text_streams_and_the_last_ones_are_not_changed(loaded, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number}. {TEXT}" for number in range(20)))
    options, heard = RunOptions(chunk=64), []
    source, questions = open_inputs([path])[0], ["What jumps?", "Who says it?"]
    want = answer_questions(loaded, source, questions, cache=448, options=options)
    got = answer_questions(
        loaded, source, questions, cache=448, options=options, every=200, so_far=heard.append, observers=[]
    )
    assert got == want
    assert [each.tokens // 200 for each in heard] == list(range(1, len(heard) + 1))
    assert all([answer.question for answer in each.answers] == questions for each in heard)
    assert max(e.end for answer in heard[0].answers for e in answer.evidence) < path.stat().st_size / 2


def test_a_pinned_instruction_is_read_first_and_moves_no_offset(loaded, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number}. {TEXT}" for number in range(9)))
    options = RunOptions(chunk=64)
    answers = answer_questions(
        loaded, open_inputs([path])[0], ["What jumps?"], cache=500, options=options, pin="Be brief and be kind."
    )
    for passage in answers.answers[0].evidence:
        assert path.read_bytes()[passage.start : passage.end].decode() == passage.quote


def test_fields_come_from_pairs_and_files(tmp_path):
    (tmp_path / "fields").write_text("rent = the monthly rent.\n\nwhen=When does it begin?\n")
    fields = read_fields(["tenant=the name of the tenant", str(tmp_path / "fields")])
    assert [(field.name, field.question) for field in fields] == [
        ("tenant", "What is the name of the tenant?"),
        ("rent", "What is the monthly rent?"),
        ("when", "When does it begin?"),
    ]


@pytest.mark.parametrize(
    ("given_", "error", "words"),
    [
        (["a=b", "a=c"], UsageError, "given twice"),
        (["missing"], UserError, "no file to read"),
        (["EMPTY"], UsageError, "there is no field"),
        (["BAD"], UsageError, "'who knows' is no field"),
    ],
)
def test_fields_that_cannot_be_are_refused(tmp_path, given_, error, words):
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BAD").write_text("a=b\nwho knows\n")
    with pytest.raises(error, match=words):
        read_fields([str(tmp_path / each) if each.isupper() else each for each in given_])


def test_a_record_has_null_where_the_text_does_not_say_it():
    fields = [Field("a", "the a"), Field("b", "the b")]
    answers = [Answer("What is the a?", "x", 0.9, True, ()), Answer("What is the b?", "y", 0.1, False, ())]
    made = record(fields, answers)
    assert made["record"] == {"a": "x", "b": None}
    assert made["fields"]["b"]["answer"] == "y"
