"""What only a trained model shows."""

from pathlib import Path

import pytest
import torch

from streamh2o.policies import make_policy
from tests.tiny import dense_losses, stream_losses

SAMPLE = Path(__file__).parents[2] / "data" / "sample.txt"


@pytest.fixture(scope="module")
def ids(loaded):
    text = SAMPLE.read_text(encoding="utf-8")
    return torch.tensor([loaded.tokenizer(text, add_special_tokens=False).input_ids[:700]])


def test_while_nothing_is_evicted_chunks_equal_the_plain_model(loaded, ids):
    ids = ids[:, :160]
    expected = dense_losses(loaded.model, ids)
    for chunk in (7, 64, 160):
        for policy in ("streamh2o", "recompute"):
            got = stream_losses(loaded.model, make_policy(policy, 256), ids, chunk)
            assert torch.allclose(got, expected, atol=1e-4), (policy, chunk)


def test_a_window_without_sinks_collapses_and_the_others_do_not(loaded, ids):
    """A random model has no sinks and would not notice."""
    losses = {
        policy: float(stream_losses(loaded.model, make_policy(policy, 128), ids, 64)[0, 300:].mean())
        for policy in ("local", "streamingllm", "h2o", "streamh2o")
    }
    for policy in ("streamingllm", "h2o", "streamh2o"):
        assert losses[policy] < losses["local"] - 0.5, losses
        assert losses[policy] < 5, losses
