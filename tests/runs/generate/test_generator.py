"""Tokens and their sampling are those of transformers, from a cache of fixed size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o import StreamCache
from streamh2o.runs.generate.generator import Generator, Sampler
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.stream.chunk_stream import cache_argument
from tests.tiny_folder import TEXT

CPU = torch.device("cpu")
PLAIN = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=1)


@pytest.mark.parametrize(
    "how",
    [
        {"greedy": True, "repetition_penalty": 1.0},
        {"greedy": True, "repetition_penalty": 1.3, "repeat_last": 10_000},
    ],
)
def test_greedy_text_is_that_of_transformers(loaded, how):
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    expected = loaded.model.generate(
        ids, do_sample=False, max_new_tokens=40, repetition_penalty=how["repetition_penalty"]
    )
    with StreamCache.for_model(loaded.model, 256) as cache:
        generator = Generator(loaded, cache, Sampling(**how))
        generator.read(ids[0].tolist())
        assert list(generator.tokens(40)) == expected[0, ids.shape[1] :].tolist()
        assert (generator.read_tokens, generator.new_tokens) == (ids.shape[1], 40)


@settings(max_examples=30, deadline=None)
@given(
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 2, 5, 100]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
)
def test_only_tokens_that_transformers_would_sample_are_sampled(temperature, top_k, top_p, min_p, seed):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 2
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, eos_token_id=None
    )
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    theirs = tiny._get_logits_processor(config, input_ids_seq_length=1)(torch.zeros(1, 1).long(), logits.clone())
    allowed = set(torch.isfinite(theirs)[0].nonzero().flatten().tolist())
    sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, 1.0, 0, False, seed), CPU)
    chosen = [sampler(logits.clone(), torch.zeros(1, 1).long()) for _ in range(200)]
    assert set(chosen) <= allowed
    likeliest = int(theirs.argmax())
    share = float(theirs.softmax(-1)[0, likeliest])
    assert abs(chosen.count(likeliest) / 200 - share) < 0.2


def test_a_seed_gives_the_same_text_again_and_another_one_another(loaded):
    texts = []
    for seed in (1, 1, 2):
        with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
            generator = Generator(loaded, cache, Sampling(seed=seed))
            generator.read([5, 6, 7])
            texts.append(list(generator.tokens(30)))
    assert texts[0] == texts[1] != texts[2]


def test_the_penalty_looks_back_over_the_newest_tokens_only():
    logits = torch.tensor([[5.0, 4.9, 0.0]])
    sampler = Sampler(Sampling(greedy=True, repetition_penalty=2.0), CPU)
    assert sampler(logits.clone(), torch.tensor([[2]])) == 0
    assert sampler(logits.clone(), torch.tensor([[0]])) == 1


def test_a_generator_remembers_as_many_tokens_as_the_penalty_needs(loaded, monkeypatch):
    seen = []
    with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
        generator = Generator(loaded, cache, Sampling(repeat_last=3, seed=1))
        sampler = generator.sampler
        monkeypatch.setattr(generator, "sampler", lambda logits, newest: seen.append(newest) or sampler(logits, newest))
        generator.read(list(range(5, 30)))
        chosen = list(generator.tokens(4))
    assert [each.tolist() for each in seen[:2]] == [[[27, 28, 29]], [[28, 29, chosen[0]]]]
    assert all(each.shape == (1, 3) for each in seen)


def test_text_that_may_not_end_holds_no_token_that_ends_it(loaded):
    with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
        ends = set(range(0, len(loaded.tokenizer), 2))
        generator = Generator(loaded, cache, PLAIN, ends, endless=True)
        generator.read([1, 3])
        assert not ends & set(generator.tokens(50))
    with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
        generator = Generator(loaded, cache, PLAIN, ends)
        generator.read([1, 3])
        *middle, last = generator.tokens(None)
        assert last in ends
        assert not ends & set(middle)


def test_the_coldest_temperature_is_greedy_and_overflows_nothing():
    logits = torch.tensor([[1e4, -1e4, 2e4, 0.0]])
    for temperature in (1e-300, 1e-5, 2e-4):
        sampler = Sampler(Sampling(temperature=temperature, seed=0), torch.device("cpu"))
        assert sampler(logits.clone(), torch.tensor([[3]])) == 2


def test_a_call_of_generate_itself_takes_the_same_cache(loaded):
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    with StreamCache.for_model(loaded.model, 32, chunk=16) as cache:
        out = loaded.model.generate(ids, max_new_tokens=200, do_sample=False, **{cache_argument(loaded.model): cache})
        assert out.shape[1] == ids.shape[1] + 200
        assert cache.max_slots <= 48
