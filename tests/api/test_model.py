"""Whatever a model is given as, it is the same one."""

import pytest
import torch

from streamh2o.api.model import to_loaded, torch_threads
from streamh2o.errors import UsageError, UserError


def test_a_pair_is_loaded_as_its_folder_is(loaded):
    again = to_loaded((loaded.model, loaded.tokenizer), kernel="torch")
    same = ("model", "tokenizer", "dtype", "device", "trained_positions", "weights")
    assert [getattr(again, name) for name in same] == [getattr(loaded, name) for name in same]
    assert to_loaded(loaded, kernel="torch").model is loaded.model
    assert to_loaded(loaded, kernel="torch").kernel.name == "torch"


def test_the_fingerprint_of_a_pair_is_that_of_its_weights(loaded):
    pair = loaded.model, loaded.tokenizer
    before = to_loaded(pair, kernel="torch").fingerprint
    assert to_loaded(pair, kernel="torch").fingerprint == before
    weight = loaded.model.lm_head.weight
    kept = weight.detach().clone()
    try:
        weight.data += 1
        assert to_loaded(pair, kernel="torch").fingerprint != before
    finally:
        weight.data.copy_(kept)


def test_a_model_in_training_mode_is_refused(loaded):
    loaded.model.train()
    try:
        with pytest.raises(UsageError, match=r"model\.eval\(\)"):
            to_loaded((loaded.model, loaded.tokenizer))
    finally:
        loaded.model.eval()


def test_what_is_no_model_is_named(loaded):
    with pytest.raises(UsageError, match="not int"):
        to_loaded(3)
    with pytest.raises(UsageError, match="in this order"):
        to_loaded((loaded.tokenizer, loaded.model))
    with pytest.raises(UsageError, match="given by its name"):
        to_loaded(loaded, dtype="float32")
    with pytest.raises(UserError, match="no-such-model"):
        to_loaded("no-such-model")


def test_threads_are_put_back_and_none_leaves_them_alone():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before
