"""A model that accelerate has spread: here over memory and disk, since the tests know no GPU."""

import pytest
import torch

from streamh2o import StreamCache
from streamh2o.cache.rotary import Rotary
from streamh2o.errors import UsageError
from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from tests import tiny

SPREAD = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
SPREAD |= {"model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "spatten"])
def test_a_model_partly_on_disk_gives_the_digits_of_one_in_memory(folder, policy):
    whole = load_model(folder, "float32", "cpu").model
    spread = load_model(folder, "float32", device_map=SPREAD).model
    assert {str(part.device) for part in spread.parameters()} == {"cpu", "meta"}
    ids = tiny.tokens(150)
    made = make_policy(policy, 32)  # plain torch: the compiled losses are not for a head that accelerate brings in
    expected, got = (tiny.stream_losses(model, made, ids, 16, kernel="torch") for model in (whole, spread))
    assert torch.equal(got, expected)


def test_generate_works_on_a_spread_model(folder):
    written = []
    for extra in ({"device": "cpu"}, {"device_map": SPREAD}):
        model = load_model(folder, "float32", **extra).model
        with StreamCache.for_model(model, cache=24, chunk=8, evict_every=4) as cache:
            written.append(model.generate(tiny.tokens(20), past_key_values=cache, max_new_tokens=20, do_sample=False))
    assert torch.equal(*written)


def test_auto_is_the_plain_model_where_all_fits(folder):
    model = load_model(folder, "float32", device_map="auto").model
    assert {part.device.type for part in model.parameters()} == {model.device.type}


def test_angles_follow_the_keys_to_their_device():
    rotary = Rotary.from_model(tiny.llama(), 64)
    first, second = (rotary.table(layer, torch.device("meta")) for layer in (0, 1))
    assert first.cos.device.type == first.sin.device.type == "meta"
    assert first is second
    assert rotary.table(0, torch.device("cpu")) is rotary.tables[0]


def test_what_cannot_be_is_one_sentence(folder):
    with pytest.raises(UsageError, match="leave one out"):
        load_model(folder, device="cpu", device_map="auto")
    with pytest.raises(UsageError, match="must be auto"):
        load_model(folder, device_map="balanced")
