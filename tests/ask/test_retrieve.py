"""Questions side by side after a chunk, with small random models."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config

from streamh2o.ask.retrieve import Part, Retriever, _groups, likelihoods
from streamh2o.models.load import load_model
from streamh2o.models.prompts import Prompter, plain_ids
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.lm_head import LmHead
from streamh2o.stream.probe_tree import ProbeTree
from tests import tiny
from tests.families import random_model
from tests.tiny_folder import TEXT, make_folder

QUESTIONS = ["What jumps over the lazy dog?", "Who?", "How many times better is it, they say?"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(make_folder(tmp_path_factory.mktemp("model"))), dtype="float32", device="cpu")


@pytest.mark.parametrize("policy", ["streamingllm", "streamh2o", "h2o"])
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_branches_of_a_probe_do_not_see_each_other(policy, family):
    model = tiny.FAMILIES[family]()
    text, stem = tiny.tokens(100), tiny.tokens(3, seed=1)
    branches = [tiny.tokens(length, seed=length) for length in (5, 1, 9)]
    with ChunkStream(model, make_policy(policy, cache=40), chunk=20) as stream:
        for start in range(0, 100, 20):
            stream.feed(text[:, start : start + 20])
        alone = [stream.probe(torch.cat([stem, each], 1))[:, 3:] for each in branches]
        tree = ProbeTree(stem[0].tolist(), [each[0].tolist() for each in branches], torch.device("cpu"))
        together = stream.probe(torch.tensor([tree.ids]), tree.branches)
    for places, each in zip(tree.places, alone, strict=True):
        torch.testing.assert_close(together[:, places], each, atol=1e-4, rtol=1e-4)


def test_looking_leaves_no_trace_in_the_stream(loaded):
    ids = tiny.tokens(96)
    results = []
    for look in (False, True):
        retriever = Retriever(loaded, Prompter(loaded.tokenizer), QUESTIONS, chunk=64)
        with ChunkStream(loaded.model, make_policy("streamh2o", cache=48), chunk=32) as stream:
            parts = []
            for start in range(0, 96, 32):
                parts.append(stream.feed(ids[:, start : start + 32]).losses)
                if look:
                    retriever.look(stream, Part(start, start + 32), b"What jumps?")
            results.append(torch.cat(parts, 1))
    assert torch.equal(*results)


def test_ten_questions_score_as_each_does_alone(loaded):
    """Also where they do not fit into one pass."""
    text = torch.tensor([plain_ids(loaded.tokenizer, TEXT * 10)[:128]])
    questions = [f"{QUESTIONS[n % 3]} {n}" for n in range(10)]
    prompter = Prompter(loaded.tokenizer)
    retrievers = [Retriever(loaded, prompter, each, 64) for each in (questions, *([one] for one in questions))]
    assert len(retrievers[0]._groups) > 1
    with ChunkStream(loaded.model, make_policy("streamingllm", cache=40), chunk=64) as stream:
        for start in range(0, 128, 64):
            stream.feed(text[:, start : start + 64])
            for retriever in retrievers:
                retriever.look(stream, Part(start, start + 64), TEXT.encode())
    for number, alone in enumerate(retrievers[1:]):
        mine, theirs = retrievers[0].best(number, 9), alone.best(0, 9)
        assert [part for part, _ in mine] == [part for part, _ in theirs]
        np.testing.assert_allclose([g for _, g in mine], [g for _, g in theirs], atol=1e-3)


def test_what_is_remembered_does_not_grow_with_the_text(loaded):
    retriever = Retriever(loaded, Prompter(loaded.tokenizer), ["Who is it?"], 64)
    text = torch.tensor([plain_ids(loaded.tokenizer, TEXT * 10)[:64]])
    with ChunkStream(loaded.model, make_policy("streamingllm", cache=40), chunk=64) as stream:
        stream.feed(text)
        for number in range(300):
            said = b"Who is it? It is I." if number == 123 else b"It is a part of a text."
            retriever.look(stream, Part(number, number + 1), said)
    assert len(retriever._seen[0].looks) < 200
    assert retriever.best(0, 1)[0][0].start == 123


def gpt2():
    """A model with learned positions."""
    return random_model(GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512))


@pytest.mark.parametrize("policy", ["streamingllm", "h2o"])
@pytest.mark.parametrize("family", [*sorted(tiny.FAMILIES), "gpt2"])
def test_paths_of_a_tree_that_begin_alike_are_read_once_and_give_what_each_gives_alone(policy, family):
    model = {**tiny.FAMILIES, "gpt2": gpt2}[family]()
    stem, paths = [3, 4], [[5, 6, 7], [5, 6, 8, 9], [], [5], [6, 7]]
    with ChunkStream(model, make_policy(policy, cache=40), chunk=20) as stream:
        for start in range(0, 100, 20):
            stream.feed(tiny.tokens(100)[:, start : start + 20])
        tree = ProbeTree(stem, paths, torch.device("cpu"))
        together = stream.probe(torch.tensor([tree.ids]), tree.branches)[0]
        alone = [stream.probe(torch.tensor([stem + path]))[0] for path in paths]
    assert tree.ids == [3, 4, 5, 6, 7, 8, 9, 6, 7]
    assert tree.branches.longest == 6
    for number, want in enumerate(alone):
        torch.testing.assert_close(together[tree.before(number)], want[1:], atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 20), max_size=30))
def test_groups_hold_every_question_once_in_order_and_fit(lengths):
    groups = _groups(lengths, 20)
    assert [n for group in groups for n in group] == list(range(len(lengths)))
    assert all(0 < sum(lengths[n] for n in group) <= 20 for group in groups)


def test_batched_likelihoods_are_those_of_each_pair_alone(loaded):
    pairs = [
        (tiny.tokens(size, seed=size)[0].tolist(), tiny.tokens(size % 5 + 1, seed=99)[0].tolist())
        for size in range(1, 400, 37)
    ]
    for (context, continuation), got in zip(pairs, likelihoods(loaded, pairs), strict=True):
        ids = torch.tensor([context + continuation])
        hidden = loaded.model.base_model(input_ids=ids).last_hidden_state[0, len(context) - 1 : -1]
        want = LmHead(loaded.model).losses(hidden, torch.tensor(continuation))
        np.testing.assert_allclose(got, want.detach().numpy(), atol=1e-4)


def test_a_chat_template_wraps_the_question_and_its_tokens_in_a_text_stay_text(tmp_path):
    from tests.model_folders import tokenizer

    made = tokenizer()
    made.chat_template = "{% for m in messages %}<s>{{ m.content }}<|im_end|>{% endfor %}{{ '>' }}"
    prompter = Prompter(made)
    ids = prompter.ask("It said <|im_end|> and <s>.", "Who?")
    start, end = made.convert_tokens_to_ids(["<s>", "<|im_end|>"])
    assert ids.count(start) == ids.count(end) == 5  # two examples of two messages, and what is asked
    assert ids[0] == start
    assert str(plain_ids(made, " said <|im_end|> and"))[1:-1] in str(ids)
    assert end in prompter.ends()


def test_a_base_model_is_asked_in_the_form_of_question_and_answer(loaded):
    want = plain_ids(loaded.tokenizer, "Text: Be kind.\n\nA b.\nQuestion: Who?\nAnswer:")
    assert Prompter(loaded.tokenizer, pin=" Be kind. ").ask("A b.", " Who? ")[-len(want) :] == want
