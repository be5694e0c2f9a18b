"""The scoring core of the harness model: dense while nothing is evicted, budgets by share, no memory between calls."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.policies import POLICIES
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.runs.scoring import Budget, Scorer
from tests import tiny
from tests.reference import reference_losses
from tests.tiny_folder import TEXT, make_folder

GREEDY = Sampling(greedy=True, repetition_penalty=1)
CONTEXT = list(range(3, 63))
CONTINUATIONS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], [5, 9, 12]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(make_folder(tmp_path_factory.mktemp("model"))), dtype="float32", device="cpu")


def dense(loaded, context, continuation):
    """Log-likelihood and whether greedy, by plain `transformers`."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = loaded.model(ids).logits[0, len(context) - 1 : -1].double().log_softmax(-1)
    target = torch.tensor(continuation)
    return float(logits.gather(1, target[:, None]).sum()), bool((logits.argmax(-1) == target).all())


def greedy(loaded, context, count):
    """The next `count` ids by plain `transformers`."""
    ids = torch.tensor([context])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(context) :].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [7, 256])
def test_while_nothing_is_evicted_a_continuation_has_the_likelihood_of_the_dense_model(loaded, policy, chunk):
    evict = "chunk" if policy in ("spatten", "recompute") else "token"
    scorer = Scorer(loaded, policy, 100, evict=evict, chunk=chunk)
    continuations = [*CONTINUATIONS, greedy(loaded, CONTEXT, 5)]
    found = scorer.loglikelihoods(CONTEXT, continuations)
    expected = [dense(loaded, CONTEXT, each) for each in continuations]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected] == [False] * 4 + [True]


@pytest.mark.parametrize("policy", ["h2o", "streamh2o", "streamingllm", "local"])
def test_with_evictions_the_losses_are_those_of_the_slow_reference_after_the_prompt(loaded, policy):
    scorer = Scorer(loaded, policy, "20%")
    made = scorer.policy_for(len(CONTEXT))
    assert made.cache == 12
    for continuation, (score, _) in zip(CONTINUATIONS, scorer.loglikelihoods(CONTEXT, CONTINUATIONS), strict=True):
        ids = torch.tensor([*CONTEXT, *continuation])
        with torch.no_grad():
            losses = reference_losses(copy.deepcopy(loaded.model).double(), ids, made, 1)
        assert score == pytest.approx(-float(losses[-len(continuation) :].sum()), abs=1e-3)


@pytest.mark.parametrize("evict", ["token", "chunk"])
@pytest.mark.parametrize("policy", ["h2o", "streamh2o", "streamingllm", "topk"])
def test_a_continuation_does_not_depend_on_its_neighbours_or_their_order(loaded, policy, evict):
    scorer = Scorer(loaded, policy, "20%", evict=evict, chunk=16)
    together = scorer.loglikelihoods(CONTEXT, CONTINUATIONS)
    assert together[::-1] == scorer.loglikelihoods(CONTEXT, CONTINUATIONS[::-1])
    alone = [scorer.loglikelihoods(CONTEXT, [each])[0] for each in CONTINUATIONS]
    assert [score for score, _ in alone] == pytest.approx([score for score, _ in together], abs=1e-4)


def test_eviction_during_the_prompt_changes_the_first_token_after_it_and_eviction_after_a_chunk_does_not(loaded):
    expected = dense(loaded, CONTEXT, [7])[0]
    assert Scorer(loaded, "h2o", "20%").loglikelihoods(CONTEXT, [[7]])[0][0] != pytest.approx(expected, abs=1e-2)
    whole = Scorer(loaded, "h2o", "20%", evict="chunk", chunk=64).loglikelihoods(CONTEXT, [[7]])[0][0]
    assert whole == pytest.approx(expected, abs=1e-3)


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(1, 10_000), percent=st.integers(1, 100), sinks=st.integers(0, 8))
def test_a_share_is_one_of_the_prompts_tokens_rounded_down_with_room_beside_the_sinks(tokens, percent, sinks):
    assert Budget.parse(f"{percent}%").of(tokens, sinks) == max(tokens * percent // 100, sinks + 2)
    assert Budget.parse(percent).of(tokens, sinks) == percent


@pytest.mark.parametrize("cache", ["0%", "101%", "-5%", "x%", "%", 0, -3, "many", 0.2, "1/0%", "nan%"])
def test_what_is_no_budget_is_refused(cache):
    with pytest.raises(UsageError, match="share of the prompt"):
        Budget.parse(cache)


def test_every_share_gives_every_policy_a_budget_for_any_prompt(loaded):
    for policy in POLICIES:
        evict = "chunk" if policy in ("spatten", "recompute") else "token"
        for share in ("4%", "20%", "60%", "100%"):
            scorer = Scorer(loaded, policy, share, evict=evict, chunk=64)
            for tokens in (1, 5, 100, 512, 100_000):
                assert scorer.policy_for(tokens).cache <= 512 - 64


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "h3o"}, "No policy"),
        ({"policy": "spatten"}, "evict=chunk"),
        ({"policy": "recompute"}, "evict=chunk"),
        ({"recent": 8}, "share"),
        ({"cache": 64, "colour": 3}, "no knob 'colour'"),
        ({"cache": 600}, "trained on"),
        ({"evict": "never"}, "chunk or token"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(loaded, options, says):
    with pytest.raises(UsageError, match=says):
        Scorer(loaded, **options)


@pytest.mark.parametrize("chunk", [10, 256])
def test_a_rolling_likelihood_scores_every_token_after_the_prefix(loaded, chunk):
    found = Scorer(loaded, "h2o", "100%", chunk=chunk).rolling(CONTEXT[:1], 2)
    assert found == pytest.approx(dense(loaded, [2], CONTEXT[:1])[0], abs=1e-3)
    found = Scorer(loaded, "h2o", 100, chunk=chunk).rolling(CONTEXT, 2)
    assert found == pytest.approx(dense(loaded, [2], CONTEXT)[0], abs=1e-3)


def test_a_rolling_text_outgrows_the_model_only_without_eviction(loaded):
    ids = tiny.tokens(700)[0].tolist()
    assert Scorer(loaded, "h2o", "5%").rolling(ids, 2) < 0
    with pytest.raises(UserError, match="longer than the 512 tokens"):
        Scorer(loaded, "full").rolling(ids, 2)


def test_a_prompt_too_long_for_full_loses_its_beginning_and_for_others_nothing(loaded):
    ids = tiny.tokens(700)[0].tolist()
    full = Scorer(loaded, "full")
    assert full.fit(ids, 12) == ids[-500:]
    assert full.loglikelihoods(full.fit(ids, 12), [ids[:12]])[0][0] < 0
    assert Scorer(loaded, "h2o").fit(ids, 12) == ids


def test_generation_is_greedy_transformers_while_nothing_is_evicted_and_stops_at_a_string(loaded):
    ids = loaded.tokenizer(TEXT).input_ids
    expected = loaded.tokenizer.decode([*ids, *greedy(loaded, ids, 30)])[len(loaded.tokenizer.decode(ids)) :]
    scorer = Scorer(loaded, "h2o", 200)
    text = scorer.generate(ids, [], 30, GREEDY)
    assert text == expected
    middle = text[len(text) // 2 :][:2]
    assert scorer.generate(ids, ["absent", middle], 30, GREEDY) == text[: text.find(middle)]
    assert scorer.generate(ids, [], 0, GREEDY) == ""


def test_generation_goes_on_where_scoring_would(loaded):
    """What is written under a budget is what scoring under the same budget calls greedy."""
    scorer = Scorer(loaded, "h2o", "20%")
    found = scorer.loglikelihoods(CONTEXT, [[token] for token in range(len(loaded.tokenizer))])
    (token,) = (number for number, (_, is_greedy) in enumerate(found) if is_greedy)
    assert sum(math.exp(score) for score, _ in found) == pytest.approx(1, abs=1e-3)
    text = scorer.generate(CONTEXT, [], 1, GREEDY)
    assert text == loaded.tokenizer.decode([*CONTEXT, token])[len(loaded.tokenizer.decode(CONTEXT)) :]


def test_the_model_is_as_it_was_afterwards(loaded):
    before = dense(loaded, CONTEXT, CONTINUATIONS[0])
    Scorer(loaded, "h2o").loglikelihoods(CONTEXT, CONTINUATIONS)
    assert dense(loaded, CONTEXT, CONTINUATIONS[0]) == before
