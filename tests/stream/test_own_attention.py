"""BLOOM, Falcon, MPT: ALiBi inside the cache, and attention modules that get another forward for a while."""

from functools import cache

import pytest
import torch

from streamh2o.cache.alibi import AlibiTable
from streamh2o.cache.families import SUPPORTED, kv_heads, trained_positions
from streamh2o.errors import UserError
from streamh2o.policies import make_policy
from streamh2o.stream import layer_attention
from streamh2o.stream.chunk_stream import ChunkStream, cache_argument
from streamh2o.stream.probe_tree import ProbeTree
from streamh2o.stream.stream_cache import StreamCache
from tests import families, tiny

CASES = {case.name: case for case in families.CASES if SUPPORTED[case.family].own_attention}
SLOPES = torch.tensor([2.0**-power for power in range(1, 9)])  # of 8 heads, as the paper has them


@cache
def model(name: str):
    return CASES[name].model()


def attention_modules(name: str):
    return [module for module in model(name).modules() if type(module).__name__.endswith("Attention")]


@pytest.mark.parametrize(("name", "scale"), [("bloom", 1.0), ("mpt", 1.0), ("falcon-alibi", 8**-0.5)])
def test_slopes_are_those_of_the_model(name, scale):
    assert torch.allclose(AlibiTable.from_model(model(name)).slopes, SLOPES * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 250, 65_500])
def test_products_of_placed_queries_and_keys_have_the_bias(dtype, start):
    """Near keys have it exactly, however far into the cache."""
    table = AlibiTable(SLOPES)
    query, keys = torch.zeros(1, 8, 2, 8, dtype=dtype), torch.zeros(1, 4, 36, 8, dtype=dtype)
    placed = table.place_keys(keys, slice(start, start + 36)).repeat_interleave(2, dim=1).float()
    logits = table.place_queries(query, slice(start + 34, start + 36), 0.5).float() @ placed.transpose(2, 3)
    bias = SLOPES[:, None] * (torch.arange(36.0) - 35)
    assert torch.equal(logits[0, :, 1] - logits[0, :, 1, -1:], bias)
    assert logits[0].abs().max() < 35 + start / 200, "small, so that bfloat16 has them exactly"


@pytest.mark.parametrize("positions", ["rolled", "distance"])
def test_slots_get_the_bias_of_their_distance_inside_the_cache(positions, monkeypatch):
    """The first layer's keys depend on their tokens alone, so that its attention can be computed from the text."""
    bloom, ids = model("bloom"), tiny.tokens(75)
    policy = make_policy("h2o", cache=20, sinks=0, recent=8, positions=positions)
    seen, attend = [], layer_attention.attend

    def watched(*given):
        output, found = attend(*given)
        seen.append(found[0, :, 0])
        return output, found

    with ChunkStream(bloom, policy, chunk=6) as stream:
        for start in range(0, 72, 6):
            stream.feed(ids[:, start : start + 6])
        held = stream.cache.slots[0].source_index[0].clone()[:, :20]
        monkeypatch.setattr(layer_attention, "attend", watched)
        stream.probe(ids[:, 72:])
    assert (held[:, 0] < 72 - 20).any(), "some hitter lies far back"
    with torch.no_grad():
        block, decoder = bloom.transformer.h[0], bloom.transformer
        states = block.input_layernorm(decoder.word_embeddings_layernorm(decoder.word_embeddings(ids)))
        query, key, _ = block.self_attention._reshape(block.self_attention.query_key_value(states))
    held = torch.cat([held, torch.arange(72, 75).expand(8, 3)], dim=1)
    places = held if positions == "distance" else torch.arange(72 - 20, 75).expand(8, 23)
    logits = query[0, :, 72:] @ key[0].gather(1, held[..., None].expand(-1, -1, 8)).transpose(1, 2) * 8**-0.5
    distance = torch.arange(72, 75)[:, None] - places[:, None]
    expected = (logits - SLOPES[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).softmax(-1)
    assert torch.allclose(seen[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_as_it_was_afterwards(name):
    ids = tiny.tokens(20)
    before = tiny.dense_losses(model(name), ids)
    with ChunkStream(model(name), make_policy("h2o", cache=16), chunk=8) as stream:
        stream.feed(ids[:, :8])
        assert not any("forward" in module.__dict__ for module in attention_modules(name))
        assert torch.equal(tiny.dense_losses(model(name), ids), before)
        stream.feed(ids[:, 8:16])
    assert not any("forward" in module.__dict__ for module in attention_modules(name))
    assert torch.equal(tiny.dense_losses(model(name), ids), before)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "mpt"])
def test_what_the_model_makes_for_its_own_attention_does_not_grow_with_the_text(name):
    made = []
    block = next(
        each
        for each in model(name).modules()
        if type(each).__name__ in ("BloomBlock", "FalconDecoderLayer", "MptBlock")
    )

    def note(module, args, kwargs):
        made.extend(value for key, value in kwargs.items() if key in ("alibi", "attention_mask") and value is not None)

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with ChunkStream(model(name), make_policy("h2o", cache=16), chunk=8) as stream:
            for _ in range(5):
                stream.feed(tiny.tokens(8))
        with StreamCache.for_model(model(name), cache=16, chunk=8) as kept, torch.no_grad():
            for _ in range(2):
                model(name)(tiny.tokens(20), **{cache_argument(model(name)): kept})
    finally:
        handle.remove()
    assert made
    assert all(tensor.shape[-1] <= 8 + 1 for tensor in made)


@pytest.mark.parametrize("name", ["bloom", "falcon", "falcon-alibi-grouped", "mpt"])
def test_generation_says_what_plain_generation_says_with_padding_too(name):
    ids, mask = tiny.tokens(12, batch=2), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    how = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    alone = [model(name).generate(ids[:1], **how | {"attention_mask": mask[:1]})[0, 12:]]
    alone.append(model(name).generate(ids[1:, 5:], **how | {"attention_mask": mask[1:, 5:]})[0, 7:])
    with StreamCache.for_model(model(name), cache=64, chunk=5) as kept:
        together = model(name).generate(ids, **{cache_argument(model(name)): kept}, **how)[:, 12:]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("positions", ["rolled", "distance"])
def test_branches_that_share_a_pass_see_what_each_sees_alone(name, positions):
    made = make_policy("h2o", cache=16, positions=positions)
    stem, *branches = (tiny.tokens(count, seed=count) for count in (3, 4, 2))
    with ChunkStream(model(name), made, chunk=6) as stream:
        for start in range(0, 36, 6):
            stream.feed(tiny.tokens(36)[:, start : start + 6])
        tree = ProbeTree(stem[0].tolist(), [branch[0].tolist() for branch in branches], torch.device("cpu"))
        found = stream.probe(torch.tensor([tree.ids]), tree.branches)
        for places, branch in zip(tree.places, branches, strict=True):
            alone = stream.probe(torch.cat([stem, branch], dim=1))[:, 3:]
            assert torch.allclose(found[:, places], alone, atol=1e-4)


@pytest.mark.parametrize("name", ["falcon", "falcon-multi-query", "falcon-yarn"])
@pytest.mark.parametrize("policy", ["streamingllm", "streamh2o"])
def test_falcon_that_rotates_can_evict_after_every_token(name, policy):
    ids, made = tiny.tokens(60), make_policy(policy, cache=16)
    expected = tiny.stream_losses(model(name), made, ids, 1)
    assert torch.allclose(tiny.stream_losses(model(name), made, ids, 13, evict="token"), expected, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("positions", ["rolled", "distance"])
def test_a_batch_slots_for_each_query_head_and_integers_go_as_with_other_families(name, positions):
    ids, made = tiny.tokens(90, batch=2), make_policy("h2o", cache=80, recent=70, positions=positions)
    both = tiny.stream_losses(model(name), made, ids, 10)
    alone = torch.cat([tiny.stream_losses(model(name), made, row[None], 10) for row in ids])
    assert torch.allclose(both, alone, atol=1e-4)
    if CASES[name].kv_heads < 8:
        own = tiny.stream_losses(model(name), made, ids[:, :80], 10, per_query_head=True)
        assert torch.allclose(own, both[:, :79], atol=1e-4)
    packed = tiny.stream_losses(model(name), made, ids, 10, kv_bits=8)
    assert torch.equal(packed[:, :19], both[:, :19])  # those that see no slot older than the 16 newest
    assert 0 < (packed - both).abs().mean() < 0.05


@pytest.mark.parametrize(("name", "heads"), [(name, case.kv_heads) for name, case in CASES.items()])
def test_kv_heads_are_read_off_the_configuration(name, heads):
    assert kv_heads(CASES[name].config()) == heads


def test_positions_without_a_number_in_the_configuration():
    bloom = CASES["bloom"].config()
    assert trained_positions(bloom) == 2048
    bloom.seq_length = 4096
    assert trained_positions(bloom) == 4096
    assert trained_positions(CASES["mpt"].config()) == 512
    longer = CASES["mpt"].config()
    longer.max_seq_len = 100_000
    assert trained_positions(longer) == 65_536


def test_code_that_a_model_brings_along_is_refused(monkeypatch):
    fresh = CASES["bloom"].model()
    kind = type(attention_modules("bloom")[0])
    monkeypatch.setattr(kind, "__module__", "transformers_modules.bloom.modeling_bloom")
    with pytest.raises(UserError, match="computes attention itself"):
        ChunkStream(fresh, make_policy("h2o", cache=16))


def test_a_module_that_has_another_forward_already_is_refused():
    module = attention_modules("mpt")[0]
    fresh = CASES["mpt"].model()
    taken = next(each for each in fresh.modules() if type(each) is type(module))
    taken.forward = taken.forward  # as accelerate does
    with pytest.raises(UserError, match="use one device"):
        ChunkStream(fresh, make_policy("h2o", cache=16))
