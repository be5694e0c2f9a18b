"""The benchmark of `generate`: what it computes, and that every contestant does the same work."""

import json

import pytest
import torch

from streamh2o.runs.bench.generate_speed import FULL, Job, bench_generate, jobs_of, largest
from streamh2o.stream.stream_cache import StreamCache
from tests import tiny
from tests.call import call_streamh2o, one_sentence
from tests.tiny_folder import make_folder


def test_the_bytes_of_a_row_are_those_that_the_caches_take():
    model = tiny.llama(layers=2, heads=8, kv_heads=2)
    full = Job(FULL, 1, 40, 8, None, 16)
    assert full.row_bytes(model) == 2 * 2 * 48 * 2 * 8 * 4  # layers, KV heads, tokens, key and value, head size, bytes
    ours = Job("streamh2o", 3, 40, 8, 12, 16)
    ids = tiny.tokens(40, batch=3)
    with StreamCache.for_model(model, cache=12, chunk=16) as cache, torch.no_grad():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=8, pad_token_id=0
        )
        held = sum(layer.scores.nbytes + layer.source_index.nbytes for layer in cache.groups[0].slots)
        assert 3 * ours.row_bytes(model) == cache.kv_bytes + held


def test_the_largest_batches_fit_and_one_more_row_would_not():
    model, limit = tiny.llama(), 200_000
    for job in largest(model, jobs_of(1, 100, 20, 0.2, 8), limit):
        assert job.batch * job.row_bytes(model) <= limit < (job.batch + 1) * job.row_bytes(model)
    assert not largest(model, jobs_of(1, 100, 20, 0.2, 8), 1000)


def test_every_case_has_a_row_for_each_and_the_model_is_given_back():
    model = tiny.llama()
    before = model.config._attn_implementation
    result = bench_generate(model, [1, 2], [40], [3], chunk=8, memory_limit=100_000, rounds=2)
    assert [case["largest_batch"] for case in result["cases"]] == [False, False, True]
    for case in result["cases"]:
        assert [row["name"] for row in case["rows"]] == [FULL, "h2o", "streamh2o"]
        assert case["rows"][0]["times_as_fast"] == case["rows"][0]["first_ratio"] == 1
        assert all(row[key] > 0 for row in case["rows"] for key in ("tokens_per_second", "first_seconds", "step_ratio"))
    batches = [row["batch"] for row in result["cases"][-1]["rows"]]
    assert batches[1] == batches[2] > batches[0]
    assert model.config._attn_implementation == before


def test_on_the_command_line(capsys, monkeypatch, tmp_path):
    call = call_streamh2o(capsys, monkeypatch)
    options = ("--model", make_folder(tmp_path), "--dtype", "float32", "--device", "cpu", "--threads", 1, "--generate")
    small = ("--prompt", "40", "--batch", "1,2", "--new", "3", "--chunk", "8", "--rounds", "1")
    code, out, _ = call("bench", *options, *small, "--json", "-")
    assert code == 0
    assert len(json.loads(out)["cases"]) == 2
    code, out, _ = call("bench", *options, *small, "--memory-limit", "100kB")
    assert code == 0
    assert "at most 100.0 kB" in out
    for wrong, said in ((("--memory-limit", "much"), "a size such as"), (("--new", "1"), "2 or more")):
        code, _, err = call("bench", *options, *wrong)
        assert code == 2
        assert said in one_sentence(err)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_share_is_of_the_prompt(share):
    assert [job.slots for job in jobs_of(1, 100, 5, share, 8)] == [None, int(100 * share), int(100 * share)]
