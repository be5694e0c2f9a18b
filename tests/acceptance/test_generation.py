"""What a trained model writes from a cache that evicts."""

from pathlib import Path

import pytest
import torch

from streamh2o import StreamCache
from streamh2o.runs.generate.generator import Generator
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.stream.chunk_stream import cache_argument
from tests.tiny import dense_losses

SAMPLE = Path(__file__).parents[2] / "data" / "sample.txt"


@pytest.fixture(scope="module")
def ids(loaded):
    text = SAMPLE.read_text(encoding="utf-8")
    return torch.tensor([loaded.tokenizer(text, add_special_tokens=False).input_ids[:220]])


def test_while_nothing_is_evicted_the_tokens_are_those_of_plain_transformers(loaded, ids):
    how = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20, "attention_mask": torch.ones(1, 60)}
    expected = loaded.model.generate(ids[:, :60], **how)
    with StreamCache.for_model(loaded.model, cache=128, chunk=32) as cache:
        assert torch.equal(loaded.model.generate(ids[:, :60], **{cache_argument(loaded.model): cache}, **how), expected)


def written(loaded, ids, policy) -> float:
    """Mean loss, by the model with its whole context, of 150 tokens written from 64 slots after a prompt of 220."""
    with StreamCache.for_model(loaded.model, cache=64, policy=policy, chunk=64, evict_every=16) as cache:
        generator = Generator(loaded, cache, Sampling(temperature=0.7, seed=1))
        generator.read(ids[0].tolist())
        new = list(generator.tokens(150))
        assert cache.evictions > 9
    return float(dense_losses(loaded.model, torch.cat([ids, torch.tensor([new])], dim=1))[0, -150:].mean())


@pytest.mark.slow
def test_text_written_across_evictions_is_likely_to_the_whole_model_and_without_sinks_it_is_not(loaded, ids):
    losses = {policy: written(loaded, ids, policy) for policy in ("streamh2o", "h2o", "streamingllm", "local")}
    for policy in ("streamh2o", "h2o", "streamingllm"):
        assert losses[policy] < 3.5, losses
        assert losses[policy] < losses["local"] - 0.4, losses
