"""`answer --checkpoint`: a run that was stopped or killed gives the answers of an unbroken one."""

import json
import random
import signal
import time

import pytest
import torch

from streamh2o.ask.answer import Answer
from streamh2o.ask.answer_run import answer_questions
from streamh2o.ask.retrieve import Retriever
from streamh2o.errors import UserError
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.text.sources import open_inputs
from tests.call import one_sentence
from tests.programs import ended
from tests.tiny_folder import TEXT

QUESTIONS = ["What jumps over the lazy dog?", "Who?", "How many times better is it, they say?"]
SMALL = ("--cache", 460, "--chunk", 48, "--dtype", "float32", "--device", "cpu", "--threads", 1)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{number}. Élan! {TEXT}" for number in range(40)))
    return path


@pytest.mark.parametrize("pin", ["", "Say little."])
def test_every_checkpoint_leads_to_the_same_answers(loaded, book, pin):
    states: list = []

    def keep(answering, stopping):
        tensors, counts = answering.state()
        states.append(({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(counts))))

    def answers(**more):
        how = {"cache": 460, "options": RunOptions(chunk=48), "pin": pin}
        return answer_questions(loaded, open_inputs([book])[0], QUESTIONS, **how, **more)

    whole = answers(keep=keep)
    assert len(states) > 20 + len(QUESTIONS)
    for saved in [*states[::5], *states[-4:]]:
        assert answers(saved=saved) == whole


def test_an_answer_survives_json():
    answer = Answer.of(json.loads(json.dumps(Answer("q", "a", 0.1 + 0.2, True, ()).to_dict())))
    assert answer == Answer("q", "a", 0.1 + 0.2, True, ())


def test_a_damaged_state_is_one_sentence(loaded, book):
    states: list = []
    how = {"cache": 460, "options": RunOptions(chunk=48, max_tokens=200)}
    answer_questions(
        loaded, open_inputs([book])[0], QUESTIONS, **how, keep=lambda answering, _: states.append(answering.state())
    )
    tensors, counts = states[1]
    wrong = [
        (tensors, {**counts, "answers": [{"question": "?"}]}),
        (tensors, {**counts, "answers": None}),
        ({name: each for name, each in tensors.items() if not name.startswith("question1")}, counts),
        ({**tensors, "question0.nll": torch.zeros(3, 3)}, counts),
        ({**tensors, "question0.places": tensors["question0.places"].float()}, counts),
        ({**tensors, "question0.places": tensors["question0.places"] + 10**12}, counts),
        ({**tensors, "question2.count": torch.tensor(-1)}, counts),
    ]
    for saved in wrong:
        with pytest.raises(UserError, match=r"saved state is damaged \(\w+\); start anew"):
            answer_questions(loaded, open_inputs([book])[0], QUESTIONS, **how, saved=saved)


def asking(folder, input, json_file, *more):
    questions = [part for question in QUESTIONS for part in ("-q", question)]
    return ("answer", input, *questions, "--model", folder, *SMALL, "--json", json_file, "--quiet", *more)


@pytest.mark.parametrize("limit", [(), ("--max-tokens", 700)])
def test_stdin_is_piped_in_again_checked_and_quoted_from(streamh2o, folder, book, tmp_path, monkeypatch, limit):
    text, line = book.read_bytes(), asking(folder, "-", tmp_path / "a.json", *limit)
    assert streamh2o(*line, stdin=text)[0] == 0
    whole = (tmp_path / "a.json").read_text()
    saving = (*line, "--checkpoint", tmp_path / "saved", "--checkpoint-every", 300)
    with monkeypatch.context() as patch:  # killed while it answers: the whole text has been read
        patch.setattr("streamh2o.ask.second_look.SecondLook.answer", lambda *_: exec("raise RuntimeError('killed')"))
        assert streamh2o(*saving, stdin=text)[0] == 1
    code, _, err = streamh2o(*saving, "--resume", stdin=b"X" + text[1:])
    assert code == 1
    assert "not those read before" in one_sentence(err)
    code, _, err = streamh2o(*saving, "--resume", stdin=text[:50])
    assert "ends after 50 bytes" in one_sentence(err)
    assert streamh2o(*saving, "--resume", stdin=text)[0] == 0
    assert (tmp_path / "a.json").read_text() == whole
    (tmp_path / "a.json").unlink()
    monkeypatch.setattr("streamh2o.models.load.load_model", None)
    assert streamh2o(*saving, "--resume", stdin=b"")[0] == 0  # finished: nothing is read or loaded again
    assert (tmp_path / "a.json").read_text() == whole


def test_another_question_is_refused_by_name(streamh2o, folder, book, tmp_path):
    line = (*asking(folder, book, tmp_path / "a.json"), "--checkpoint", tmp_path / "saved")
    assert streamh2o(*line)[0] == 0
    for option in ("-q", "Why?"), ("--pin", "Be brief."), ("--chunk", 40):
        code, _, err = streamh2o(*line, "--resume", *option)
        assert code == 2
        assert "at the checkpoint" in one_sentence(err)
    code, _, err = streamh2o(*line)
    assert code == 2
    assert "--resume, or name another folder" in one_sentence(err)


def test_ctrl_c_answers_from_what_was_read_and_resume_from_all_of_it(streamh2o, folder, book, tmp_path, monkeypatch):
    line = asking(folder, book, tmp_path / "a.json")
    assert streamh2o(*line)[0] == 0
    whole = (tmp_path / "a.json").read_text()
    look, left = Retriever.look, iter(range(10))

    def look_and_stop(self, *arguments):
        look(self, *arguments)
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)

    saving = [each for each in (*line, "--checkpoint", tmp_path / "saved") if each != "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr("streamh2o.ask.retrieve.Retriever.look", look_and_stop)
        code, _, err = streamh2o(*saving)
    assert code == 130
    assert "answers are from what was read" in err
    assert "--resume goes on from it" in err
    assert (tmp_path / "a.json").read_text() != whole
    assert streamh2o(*saving, "--resume")[0] == 0
    assert (tmp_path / "a.json").read_text() == whole


def marks(folder):
    """What tells whether anything has been saved in a folder since."""
    return {each.name: each.stat().st_mtime_ns for each in folder.rglob("*.json")} if folder.exists() else {}


def test_killed_ten_times_the_answers_are_the_same(start, folder, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("".join(f"{number}. {TEXT}" for number in range(2000)))
    assert ended(start(tmp_path, *asking(folder, text, tmp_path / "whole.json"))) == 0
    chance, saved = random.Random(0), tmp_path / "saved"
    line = asking(folder, "-", tmp_path / "a.json", "--checkpoint", saved, "--checkpoint-every", 400, "--resume")
    kills = 0
    while kills < 10:
        before, process = marks(saved), start(tmp_path, *line, stdin=text)
        soon = time.monotonic() + chance.uniform(0, 1.5)  # every other time; else when something has been saved
        while process.is_alive() and (time.monotonic() < soon if kills % 2 else marks(saved) == before):
            time.sleep(0.01)
        process.kill()
        if ended(process) != -signal.SIGKILL:
            break
        kills += 1
    assert kills >= 3
    assert ended(start(tmp_path, *line, stdin=text)) == 0, (tmp_path / "stderr").read_text()
    assert (tmp_path / "a.json").read_text() == (tmp_path / "whole.json").read_text()


def test_an_interrupt_between_two_answers_saves_the_first(loaded, book, monkeypatch):
    from streamh2o.ask.second_look import SecondLook

    second_look, states = SecondLook.answer, []
    how = {"cache": 460, "options": RunOptions(chunk=48, max_tokens=300)}
    whole = answer_questions(loaded, open_inputs([book])[0], QUESTIONS, **how)
    with Interrupt() as interrupt:

        def answer_and_stop(self, number):
            interrupt.requested = True
            return second_look(self, number)

        monkeypatch.setattr(SecondLook, "answer", answer_and_stop)
        keep = lambda answering, stopping: states.append(answering.state()) if stopping else None  # noqa: E731
        given = answer_questions(loaded, open_inputs([book])[0], QUESTIONS, **how, interrupt=interrupt, keep=keep)
    assert (given.answers, given.complete) == (whole.answers[:1], False)
    monkeypatch.setattr(SecondLook, "answer", second_look)
    assert len(states[-1][1]["answers"]) == 1
    assert answer_questions(loaded, open_inputs([book])[0], QUESTIONS, **how, saved=states[-1]) == whole
