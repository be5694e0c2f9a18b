"""Every supported family, as a tiny random model: equal to plain transformers, within its budget, and causal."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from streamh2o.cache.families import SUPPORTED
from streamh2o.cache.positions import beyond_window, in_cache_positions
from streamh2o.cache.rotary import RotaryTable
from streamh2o.errors import UserError
from streamh2o.models.load import load_model
from streamh2o.models.self_test import transformers_losses
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream, cache_argument
from streamh2o.stream.stream_cache import StreamCache
from tests import families, model_folders, models_page, tiny

INSTALLED = Version(transformers.__version__)


def runs(family: str) -> bool:
    return not SUPPORTED[family].since or Version(SUPPORTED[family].since) <= INSTALLED


CASES = {case.name: case for case in families.CASES if runs(case.family)}


@cache
def model(name: str):
    return CASES[name].model()


def stream_losses(name: str, policy, ids, chunk):
    return tiny.stream_losses(model(name), policy, ids, chunk)[0]


def test_every_supported_family_has_a_case():
    assert {case.family for case in families.CASES} == set(SUPPORTED)


@pytest.mark.parametrize("name", CASES)
def test_while_nothing_is_evicted_chunks_equal_the_plain_model(name):
    ids = tiny.tokens(40)
    expected = transformers_losses(model(name), ids)
    one_by_one = stream_losses(name, make_policy("h2o", cache=64), ids[:, :12], 1)
    assert torch.allclose(one_by_one, expected[:11], atol=1e-4), "chunk 1"
    for policy, chunk in (("streamh2o", 7), ("full", 20), ("recompute", 40)):
        got = stream_losses(name, make_policy(policy, cache=64), ids, chunk)
        assert torch.allclose(got, expected, atol=1e-4), f"{policy}, chunk {chunk}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["h2o", "streamh2o"])
def test_after_evictions_the_budget_and_the_sinks_are_kept_and_losses_are_numbers(name, policy):
    ids, made = tiny.tokens(60), make_policy(policy, cache=16)
    with ChunkStream(model(name), made, chunk=6) as stream:
        for start in range(0, 60, 6):
            losses = stream.feed(ids[:, start : start + 6]).losses
            assert torch.isfinite(losses).all()
            assert stream.slots == min(stream.tokens, 16)
            for layer in stream.cache.slots:
                assert layer.keys.shape[1] == CASES[name].kv_heads
                index = layer.source_index[:, :, : layer.used]
                assert (index[..., :4] == torch.arange(4)).all()
                assert (index[..., -made.recent :] == torch.arange(stream.tokens)[-made.recent :]).all()
        assert stream.evictions > 0


@pytest.mark.parametrize("name", CASES)
def test_changing_a_token_never_changes_an_earlier_loss(name):
    ids = tiny.tokens(48)
    made = make_policy("streamh2o", cache=16)
    before = stream_losses(name, made, ids, 7)
    changed = 31  # within a chunk, after evictions
    ids[0, changed] = (ids[0, changed] + 1) % families.VOCABULARY
    after = stream_losses(name, made, ids, 7)
    assert torch.equal(before[: changed - 1], after[: changed - 1])
    assert (before[changed:] - after[changed:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["mistral-window", "phi3-window"])
@pytest.mark.parametrize("policy", ["streamingllm", "h2o", "streamh2o"])
def test_where_every_layer_has_a_window_and_the_cache_holds_it_nothing_is_lost(name, policy):
    """However much is evicted: what a layer may look at is still there."""
    extra = {} if policy == "streamingllm" else {"recent": families.WINDOW + 4}
    ids, made = tiny.tokens(90), make_policy(policy, cache=24, sinks=2, **extra)
    got = stream_losses(name, made, ids, 8)
    assert torch.allclose(got, transformers_losses(model(name), ids), atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    policy=st.sampled_from(["h2o", "streamh2o", "streamingllm", "local"]),
    cache=st.integers(8, 30),
    chunk=st.integers(1, 12),
    count=st.integers(1, 70),
    window=st.integers(1, 40),
)
def test_what_a_window_hides_is_what_lies_farther_inside_the_cache(policy, cache, chunk, count, window):
    with torch.inference_mode(), ChunkStream(tiny.llama(layers=1), make_policy(policy, cache), chunk=chunk) as stream:
        stream.feed(tiny.tokens(chunk))
        for start in range(0, count, chunk):
            stream.feed(tiny.tokens(chunk, seed=start))
        held, layer = stream.cache, stream.cache.slots[0]
        fresh = torch.zeros(1, 2, chunk, 8)
        held.append(fresh, fresh, 0)
        hidden = beyond_window(held, layer, chunk, window)
        first, runs = in_cache_positions(held, layer, chunk)
        for head in range(2):
            places = []
            for start, end, position in runs:
                own = range(position, position + end - start) if isinstance(position, int) else position[0, head]
                places += [int(place) for place in own]
            far = [[first + query - place >= window for place in places] for query in range(chunk)]
            if hidden is None:
                assert not any(map(any, far))
            else:
                seen = hidden.expand(1, 2, 1, chunk, len(places))[0, head, 0]
                assert seen.tolist() == far


@pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope"])
def test_longrope_takes_the_long_angles_where_cache_and_chunk_exceed_its_first_length(name):
    ids = tiny.tokens(160)
    expected = transformers_losses(model(name), ids)  # longer than the first length, 128
    assert torch.allclose(stream_losses(name, make_policy("h2o", cache=160), ids, 32), expected, atol=1e-4)
    with ChunkStream(model(name), make_policy("h2o", cache=100), chunk=28) as stream:
        assert stream.trained == 128
    with ChunkStream(model(name), make_policy("h2o", cache=101), chunk=28) as stream:
        assert stream.trained == 512


def test_dynamic_rope_keeps_the_angles_of_its_first_length():
    grown = CASES["llama-dynamic"].model()
    transformers_losses(grown, tiny.tokens(600))  # beyond the 512 positions: transformers stretches the angles
    ids = tiny.tokens(40)
    got = tiny.stream_losses(grown, make_policy("h2o", cache=64), ids, 7)[0]
    assert torch.allclose(got, transformers_losses(model("llama"), ids), atol=1e-4)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_learned_positions_end_where_the_training_did(family):
    short = CASES[family].make()
    short.max_position_embeddings = 64
    made = families.random_model(short)
    with ChunkStream(made, make_policy("h2o", cache=16), chunk=8) as stream:
        for start in range(0, 64, 8):
            stream.feed(tiny.tokens(64)[:, start : start + 8])
        with pytest.raises(UserError, match=r"has learned 64 positions.*--max-tokens 64"):
            stream.feed(tiny.tokens(1))
    with ChunkStream(made, make_policy("recompute", cache=16), chunk=8) as stream:  # a window starts at 0 again
        for start in range(0, 80, 8):
            assert torch.isfinite(stream.feed(tiny.tokens(80)[:, start : start + 8]).losses).all()


def test_another_family_is_refused_by_name():
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.CodeGenConfig(n_layer=1, vocab_size=32))
    with pytest.raises(UserError, match=r"'codegen' model, which cannot be run: its architecture is not among"):
        ChunkStream(made, make_policy("h2o", cache=16))


@pytest.mark.skipif(runs("gptj"), reason="this release of transformers can run GPT-J")
def test_gpt_j_is_refused_where_transformers_is_too_old():
    case = next(families.of_family("gptj"))
    with pytest.raises(UserError, match=r"'gptj' model.*needs transformers 5\.24 or later"):
        ChunkStream(case.model(), make_policy("h2o", cache=16))


def test_layers_that_scale_attention_each_in_its_own_way_are_refused():
    config = CASES["gpt2"].make()
    config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(UserError, match=r"'gpt2' model.*each in its own way"):
        ChunkStream(families.random_model(config), make_policy("h2o", cache=16))


def test_tokens_that_look_ahead_are_refused():
    config = CASES["gemma3_text"].make()
    config.use_bidirectional_attention = True
    with pytest.raises(UserError, match=r"'gemma3_text' model.*look ahead"):
        ChunkStream(families.random_model(config), make_policy("h2o", cache=16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_chunks_would_run_wrongly_is_not_loaded(tmp_path, monkeypatch, dtype):
    folder = str(model_folders.folder(tmp_path))
    load_model(folder, dtype=dtype, device="cpu", kernel="torch")
    monkeypatch.setattr(RotaryTable, "_check_against", lambda *args: None)
    monkeypatch.setattr(RotaryTable, "rotate", lambda self, x, cos, sin, scale=1.0: x * scale)
    with pytest.raises(UserError, match=r"read in chunks, gives losses .* nats from those of transformers"):
        load_model(folder, dtype=dtype, device="cpu", kernel="torch")


@pytest.mark.skipif(not all(map(runs, SUPPORTED)), reason="an older transformers does not run every family")
def test_the_page_of_models_is_what_the_cases_say():
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == models_page.page(), "make it anew: python -m tests.models_page"


ROTATED = [name for name in CASES if name != "gemma3" and not SUPPORTED[CASES[name].family].learned_positions]


@pytest.mark.parametrize("name", ROTATED)
def test_generation_step_by_step_equals_the_stream_before_and_after_evictions(name):
    """Keys that stay rotated from one eviction to the next, with each layer's own angles, window and soft cap."""
    policy, ids = make_policy("streamh2o", cache=24, sinks=2, recent=12, far=6), tiny.tokens(24 + 8 * 4)
    expected = stream_losses(name, policy, ids, 8)
    with StreamCache.for_model(model(name), policy=policy, chunk=8, evict_every=8) as kept, torch.no_grad():
        argument = cache_argument(model(name))
        steps = [model(name)(input_ids=ids[:, at : at + 1], **{argument: kept}).logits for at in range(ids.shape[1])]
    logits = torch.cat(steps, dim=1)[0, :-1]
    assert kept.evictions == 4
    assert torch.allclose(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"), expected, atol=1e-4)


@pytest.mark.parametrize(("name", "reason"), [("opt", "has learned its positions"), ("gemma3", "one for images")])
def test_what_a_stream_cache_cannot_serve_is_refused(name, reason):
    with pytest.raises(UserError, match=reason):
        StreamCache.for_model(model(name), cache=64)


@pytest.mark.parametrize(
    ("name", "what"),
    [("gemma2", "soft-capping"), ("mistral-window", "sliding window"), ("smollm3", "don't rotate"), ("mpt", "ALiBi")],
)
def test_eviction_after_every_token_is_refused_where_it_would_be_wrong(name, what):
    with (
        ChunkStream(model(name), make_policy("h2o", cache=16), chunk=8, evict="token") as stream,
        pytest.raises(UserError, match=what),
    ):
        stream.feed(tiny.tokens(8))
