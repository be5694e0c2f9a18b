"""What a StreamCache writes: whole or not at all, and refused where it is not what was written."""

import copy
import os

import pytest
import torch

from streamh2o.errors import UserError
from streamh2o.policies import make_policy
from streamh2o.stream.lending import cache_argument
from streamh2o.stream.stream_cache import StreamCache
from tests import tiny


@pytest.fixture
def read():
    """A model and a cache of it that has evicted."""
    model = tiny.llama()
    with StreamCache.for_model(model, cache=16, policy="h2o", chunk=8) as cache:
        with torch.no_grad():
            model(tiny.tokens(40), **{cache_argument(model): cache})
        yield model, cache


def test_any_change_of_the_file_is_noticed(read, tmp_path):
    model, cache = read
    path = tmp_path / "cache"
    cache.save(path)
    data = path.read_bytes()
    for at in [*range(0, 600, 7), *range(600, len(data), len(data) // 100)]:
        changed = bytearray(data)
        changed[at] ^= 4
        path.write_bytes(changed)
        with pytest.raises(UserError, match="read"):
            StreamCache.load(path, model)
    for length in (0, 5, 300, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match="can't be read"):
            StreamCache.load(path, model)


@pytest.mark.parametrize("other", [make_policy("h2o", 24), make_policy("h2o", 16, sinks=2), make_policy("local", 16)])
def test_another_policy_than_the_saved_one_is_refused(read, tmp_path, other):
    model, cache = read
    cache.save(tmp_path / "cache")
    with pytest.raises(UserError, match="was saved with the policy h2o"):
        StreamCache.load(tmp_path / "cache", model, policy=other)
    StreamCache.load(tmp_path / "cache", model, policy=copy.copy(cache.policy)).detach()


@pytest.mark.parametrize("name", ["", "a" * 300, "a\0b", "folder", "pipe"])
def test_what_is_no_place_for_a_file_is_refused_and_stays(read, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    os.mkfifo("pipe")
    before = sorted(os.listdir())
    with pytest.raises(UserError):
        read[1].save(name)
    assert sorted(os.listdir()) == before
    assert not os.path.isfile("pipe")


def test_the_file_has_the_permissions_of_any_other(read, tmp_path):
    (tmp_path / "plain").touch()
    read[1].save(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["cache", "plain"]
