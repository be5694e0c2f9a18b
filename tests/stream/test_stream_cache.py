"""The cache for `model.generate`: equal to plain transformers while nothing is evicted, to the stream afterwards."""

import copy
import gc
import io
import pickle
import re

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer, pipeline

from streamh2o import StreamCache, make_policy
from streamh2o.cache.decoding_cache import RotatedSlots
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels import compiled
from streamh2o.stream import lending
from streamh2o.stream.chunk_stream import ChunkStream, cache_argument
from streamh2o.stream.engine.fused import Fused
from tests import tiny
from tests.toy_tokenizers import gpt2

MASKED = tiny.VOCABULARY - 1  # an id that no prompt holds, for padding


def prompt(count: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return tiny.tokens(count, batch, seed) % MASKED


def generate(model, ids, cache=None, new=40, **how) -> torch.Tensor:
    how = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": MASKED, **how}
    how.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **{cache_argument(model): cache}, **how)


def call(model, ids, cache, **how) -> torch.Tensor:
    """Logits of one call of the model."""
    with torch.no_grad():
        return model(input_ids=ids, **{cache_argument(model): cache}, **how).logits


def step_losses(model, cache, ids) -> torch.Tensor:
    """Losses [batch, count - 1] of `ids` given token by token."""
    logits = torch.cat([call(model, ids[:, at : at + 1], cache) for at in range(ids.shape[1])], dim=1)
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_while_nothing_is_evicted_the_tokens_are_those_of_plain_transformers(family):
    model, ids = tiny.FAMILIES[family](), prompt(50, batch=2)
    with StreamCache.for_model(model, cache=128, chunk=16) as cache:
        assert torch.equal(generate(model, ids, cache), generate(model, ids))
        assert (cache.slots, cache.evictions) == (89, 0)


@pytest.mark.parametrize("how", [{"do_sample": True}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_sampling_and_beams_give_what_the_growing_cache_gives(how):
    model, ids = tiny.llama(), prompt(30, batch=2)
    torch.manual_seed(3)
    expected = generate(model, ids, **how)
    with StreamCache.for_model(model, cache=128, chunk=16) as cache:
        torch.manual_seed(3)
        assert torch.equal(generate(model, ids, cache, **how), expected)


POLICIES = {
    "streamh2o": {"cache": 24, "sinks": 2, "recent": 12, "far": 6},
    "rolled": {"cache": 24, "sinks": 2, "recent": 12, "far": 6, "positions": "rolled"},
    "h2o": {"cache": 24, "sinks": 2},
    "streamingllm": {"cache": 24, "sinks": 3},
    "local": {"cache": 24},
    "h2-only": {"cache": 24},
    "sparse-fixed+h2": {"cache": 24, "block": 8, "summary_tokens": 2},
    "spatten": {"cache": 24},
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("positions", [512, 64])
def test_steps_between_evictions_are_one_chunk_of_the_stream(name, positions):
    """Token by token with old keys kept rotated, against chunks that rotate everything; also beyond the model's end."""
    policy = make_policy("streamh2o" if name == "rolled" else name, **POLICIES[name])
    model, ids = tiny.llama(positions=positions).double(), tiny.tokens(24 + 8 * 14, batch=2)
    expected = tiny.stream_losses(model, policy, ids, 8)
    with StreamCache.for_model(model, policy=policy, chunk=8, evict_every=8) as cache:
        assert torch.allclose(step_losses(model, cache, ids).float(), expected, atol=1e-5)
        assert cache.evictions == 14
        assert cache.slots == 24
        assert cache.max_slots == 32


@settings(max_examples=20, deadline=None)
@given(
    budget=st.integers(8, 40),
    chunk=st.integers(1, 20),
    every=st.integers(1, 30),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_whatever_the_lengths_of_calls_the_slots_stay_within_budget_and_chunk(budget, chunk, every, lengths):
    model = tiny.llama(layers=1, positions=64)
    with StreamCache.for_model(model, cache=budget, chunk=chunk, evict_every=every) as cache:
        for number, count in enumerate(lengths, 1):
            call(model, prompt(count), cache)
            assert cache.max_slots <= budget + chunk
            assert cache.slots <= budget + max(0, min(every, chunk) - 1)
            (group,) = cache.groups
            group.settle()
            index = group.slots[0].source_index[:, :, : group.used]
            assert (index.diff(dim=-1) > 0).all()
            assert (index[..., -1] == sum(lengths[:number]) - 1).all()
            sinks = min(4, group.used)
            assert (index[..., :sinks] == torch.arange(sinks)).all()
        assert cache.get_seq_length() == sum(lengths)


def test_a_long_prompt_goes_through_in_chunks_as_through_the_stream():
    """Longer than the model's trained length too."""
    model, ids = tiny.llama(positions=128), tiny.tokens(300)
    policy = make_policy("streamh2o", 40)
    with ChunkStream(model, policy, chunk=32) as stream:
        for piece in ids.split(32, dim=1):
            stream.feed(piece)
        with torch.inference_mode():
            expected = stream.logits(stream._last_hidden)
    with StreamCache.for_model(model, policy=policy, chunk=32) as cache:
        assert torch.allclose(call(model, ids, cache, logits_to_keep=1), expected, atol=1e-4)
        assert cache.slots == 40


@pytest.mark.parametrize("keep", [0, 1, 40])
def test_logits_of_a_prompt_in_pieces_are_those_that_were_asked_for(keep):
    model, ids = tiny.llama(), tiny.tokens(70, batch=2)
    with torch.no_grad():
        expected = model(ids, logits_to_keep=keep).logits
    with StreamCache.for_model(model, cache=128, chunk=16) as cache:
        assert torch.allclose(call(model, ids, cache, logits_to_keep=keep), expected, atol=1e-4)


@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "streamingllm"])
def test_a_row_of_a_padded_batch_gets_what_it_gets_alone(policy):
    model, lengths = tiny.llama().double(), (70, 33, 5)  # chaotic: float32 would tell rows of a batch apart
    rows = [prompt(length, seed=length) for length in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (70 - row.shape[1], 0), value=MASKED) for row in rows])
    with StreamCache.for_model(model, cache=32, policy=policy, chunk=16, evict_every=4) as cache:
        both = generate(model, ids, cache, new=60, attention_mask=(ids != MASKED).long())
        assert min(group.evictions for group in cache.groups) > 0
        for layer in (layer for group in cache.groups for layer in group.slots):
            assert (layer.source_index[:, :, : cache.policy.sinks] == torch.arange(cache.policy.sinks)).all()
    for row, alone in zip(both, rows, strict=True):
        with StreamCache.for_model(model, cache=32, policy=policy, chunk=16, evict_every=4) as cache:
            assert torch.equal(generate(model, alone, cache, new=60)[0], row[70 - alone.shape[1] :])


def test_padded_rows_and_beams_go_together():
    model, ids = tiny.llama(), prompt(20, batch=2)
    ids[1, :7] = MASKED
    mask = (ids != MASKED).long()
    with StreamCache.for_model(model, cache=64, chunk=8) as cache:
        got = generate(model, ids, cache, new=12, num_beams=2, attention_mask=mask)
    assert torch.equal(got, generate(model, ids, new=12, num_beams=2, attention_mask=mask))


def test_the_decoder_alone_gives_all_states_whatever_the_model_was_asked_for_before():
    model, ids = tiny.llama(), prompt(20)
    with StreamCache.for_model(model, cache=64, chunk=8) as cache, torch.no_grad():
        call(model, ids, cache, logits_to_keep=1)
        assert model.model(ids, **{cache_argument(model): cache}).last_hidden_state.shape == (1, 20, 64)
        assert model(ids, None, None, cache).logits.shape[1] == 20


def test_a_second_call_goes_on_where_the_first_one_ended():
    model, ids = tiny.llama(), prompt(30)
    with StreamCache.for_model(model, cache=128, chunk=16) as cache:
        first = generate(model, ids, cache, new=10)
        more = torch.cat([first, prompt(7, seed=1)], dim=1)
        assert torch.equal(generate(model, more, cache, new=10), generate(model, more, new=10))


@pytest.mark.usefixtures("built")
def test_a_step_reads_the_output_embedding_as_it_lies_and_leaves_it_alone_afterwards(monkeypatch):
    model, ids, seen = tiny.llama().bfloat16(), tiny.tokens(20), []
    own, few = model.lm_head.__dict__.copy(), compiled.few_linear
    monkeypatch.setattr(compiled, "few_linear", lambda x, *rest: seen.append(x.shape) or few(x, *rest))

    def steps(kernel):
        with StreamCache.for_model(model, cache=8, kernel=kernel) as cache:
            return torch.cat([call(model, part, cache)[:, -1:] for part in (ids[:, :10], *ids[:, 10:].split(1, 1))], 1)

    expected = steps("torch")
    assert not seen
    assert (steps("compiled") - expected).abs().max() <= 0.05 * expected.abs().max()
    assert [shape for shape in seen if len(shape) == 3] == [(1, 1, model.config.hidden_size)] * 10
    with StreamCache.for_model(model, cache=8, kernel="compiled") as cache, pytest.raises(UsageError):
        call(model, ids, cache, output_attentions=True)
    assert model.lm_head.__dict__ == own
    monkeypatch.setattr(model.lm_head, "forward", lambda x: x, raising=False)  # somebody else's
    with StreamCache.for_model(model, cache=8, kernel="compiled") as cache:
        assert call(model, ids[:, :1], cache).shape[-1] == model.config.hidden_size


@pytest.mark.usefixtures("built")
def test_a_step_of_a_head_that_is_trained_keeps_its_gradient():
    model = tiny.llama().bfloat16().requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    with StreamCache.for_model(model, cache=8, kernel="compiled") as cache:
        model(tiny.tokens(1), **{cache_argument(model): cache}).logits.float().square().sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.usefixtures("built")
def test_after_a_call_that_was_cut_off_the_output_embedding_is_the_models_own(monkeypatch):
    model = tiny.llama().bfloat16()
    with StreamCache.for_model(model, cache=8, kernel="compiled") as cache:
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as cut:
            cut.setattr(compiled, "few_linear", interrupt)
            call(model, tiny.tokens(1), cache)
        assert "forward" not in vars(model.lm_head)


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("make", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_model_without_an_output_embedding_reads_too(make):
    config = copy.deepcopy(tiny.llama().config)
    config.pad_token_id = 0
    model = getattr(transformers, make).from_config(config).eval()
    with StreamCache.for_model(model, cache=8, chunk=8) as cache, torch.no_grad():
        model(tiny.tokens(30), **{cache_argument(model): cache})
        assert cache.evictions
    assert not any("forward" in vars(each) for each in (model, model.base_model))


def test_the_model_is_as_it_was_whichever_way_the_cache_goes():
    model, ids = tiny.llama(), tiny.tokens(20)
    before = copy.deepcopy(model.__dict__)
    with torch.no_grad():
        expected = model(ids).logits

    def check():
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)

    def clean():
        check()
        assert not [module for module in model.modules() if "forward" in vars(module)]
        assert model.config._attn_implementation == before["config"]._attn_implementation
        assert model.__dict__.keys() == before.keys()

    with StreamCache.for_model(model, cache=8) as cache:
        call(model, ids, cache)
        check()  # attached, and asked without it
        grown = DynamicCache(config=model.config)
        assert torch.allclose(call(model, ids, grown), expected, atol=1e-5)
    clean()
    with pytest.raises(UserError, match="does not belong"):
        call(model, ids, cache)
    clean()
    one, two = StreamCache.for_model(model, cache=8), StreamCache.for_model(model, cache=8)
    call(model, ids, one)
    one.detach()
    one.detach()
    call(model, ids, two)
    del one, two
    gc.collect()
    clean()


def test_a_stream_and_a_cache_share_a_model():
    model, ids = tiny.llama(), tiny.tokens(40)
    alone = tiny.stream_losses(model, make_policy("h2o", 16), ids, 8)
    with StreamCache.for_model(model, cache=16) as cache, ChunkStream(model, make_policy("h2o", 16), chunk=8) as stream:
        parts = []
        for piece in ids.split(8, dim=1):
            parts.append(stream.feed(piece).losses)
            call(model, piece, cache)
    assert torch.equal(torch.cat(parts, dim=1), alone)


class _Stopped(KeyboardInterrupt):
    pass


def test_a_step_cut_off_by_ctrl_c_leaves_no_trace():
    model, ids = tiny.llama(), tiny.tokens(60)
    layer = model.model.layers[1].mlp

    def stop(*_):
        raise _Stopped

    how = {"cache": 16, "policy": "streamingllm", "chunk": 8, "evict_every": 4}
    with StreamCache.for_model(model, **how) as cache:
        expected = step_losses(model, cache, ids)
    with StreamCache.for_model(model, **how) as cache:
        logits = []
        for at in range(60):
            if at % 7 == 3:
                handle = layer.register_forward_pre_hook(stop)
                with pytest.raises(_Stopped):
                    call(model, ids[:, at : at + 1], cache)
                handle.remove()
                with torch.no_grad():
                    model(ids[:, :1])  # the plain model, at once
                assert model.config._attn_implementation != "streamh2o"
            logits.append(call(model, ids[:, at : at + 1], cache))
        got = torch.nn.functional.cross_entropy(
            torch.cat(logits, dim=1)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        assert torch.equal(got, expected)
        handle = layer.register_forward_pre_hook(stop)
        with pytest.raises(_Stopped):
            call(model, ids, cache)
        handle.remove()
        with pytest.raises(UserError, match="cut off"):
            call(model, ids[:, :1], cache)
        cache.reset()
        call(model, ids[:, :1], cache)


@pytest.mark.usefixtures("built")
def test_a_step_cut_off_before_the_model_is_run_leaves_no_trace(monkeypatch):
    model, ids = tiny.llama(), tiny.tokens(20)
    with StreamCache.for_model(model, cache=16) as cache:
        expected = step_losses(model, cache, ids)
    with StreamCache.for_model(model, cache=16) as cache:
        parts = [call(model, ids[:, :1], cache)]
        for at in range(1, 20):
            for where in ((lending, "fused"), (Fused, "on")):
                with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
                    cut.setattr(*where, interrupt)
                    call(model, ids[:, at : at + 1], cache)
            parts.append(call(model, ids[:, at : at + 1], cache))
    logits = torch.cat(parts, dim=1)[:, :-1].transpose(1, 2)
    assert torch.equal(torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none"), expected)


@pytest.mark.parametrize("length", [1, 8])
def test_after_an_eviction_that_was_cut_off_the_cache_says_so(monkeypatch, length):
    model, ids = tiny.llama(), tiny.tokens(60)
    with StreamCache.for_model(model, cache=16, policy="h2o", chunk=8, evict_every=8) as cache:
        for at in range(23):
            call(model, ids[:, at : at + 1], cache)
        with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
            cut.setattr(RotatedSlots, "compact", interrupt)
            call(model, ids[:, 23 : 23 + length], cache)
        with pytest.raises(UserError, match="cut off"):
            call(model, ids[:, :1], cache)
        cache.reset()
        call(model, ids[:, :1], cache)


def test_memory_made_in_inference_mode_serves_outside_it_too():
    model, ids = tiny.llama(), tiny.tokens(40)
    with StreamCache.for_model(model, cache=16, chunk=8, evict_every=4) as cache:
        with torch.inference_mode():
            call(model, ids[:, :20], cache)
        for at in range(20, 40):
            call(model, ids[:, at : at + 1], cache)
        assert cache.get_seq_length() == 40


def test_streamers_and_pipelines_work():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gpt2(), eos_token="<|im_end|>", pad_token="<s>")
    model = tiny.build(tiny.LlamaConfig(**{**tiny.llama().config.to_dict(), "vocab_size": len(tokenizer)}))
    text = "The quick brown fox jumps over the lazy dog."
    expected = generate(model, tokenizer(text, return_tensors="pt").input_ids, new=20, pad_token_id=0)
    continuation = tokenizer.decode(expected[0], skip_special_tokens=True)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    plain = pipe(text, max_new_tokens=20, do_sample=False)
    with StreamCache.for_model(model, cache=128) as cache:
        assert pipe(text, max_new_tokens=20, do_sample=False, **{cache_argument(model): cache}) == plain
        assert cache.slots > 20
    seen = []

    class Seen(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            seen.append(text)

    with StreamCache.for_model(model, cache=128) as cache:
        ids = tokenizer(text, return_tensors="pt").input_ids
        generate(model, ids, cache, new=20, pad_token_id=0, streamer=Seen(tokenizer, skip_special_tokens=True))
    assert "".join(seen).strip() == continuation.strip()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"prompt_lookup_num_tokens": 3}, "Assisted decoding"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attention"),
        ({"attention_mask": torch.tensor([[1] * 19 + [0]])}, "padding"),
        ({"attention_mask": torch.tensor([[0] * 20])}, "padding only"),
        ({"cache_implementation": "static"}, "cache_implementation"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_the_model_stays_well(how, words):
    model, ids = tiny.llama(), prompt(20)
    expected = generate(model, ids)
    with (
        StreamCache.for_model(model, cache=64) as cache,
        pytest.raises((UserError, ValueError), match=re.escape(words)),
    ):
        generate(model, ids, cache, **how)
    assert torch.equal(generate(model, ids), expected)


def test_settings_and_models_that_do_not_fit_are_refused():
    model = tiny.llama(positions=64)
    for settings_ in ({"cache": 65}, {"cache": 60, "chunk": 8}, {"evict_every": 0}, {"policy": "recompute"}):
        with pytest.raises(UsageError):
            StreamCache.for_model(model, **{"cache": 32, **settings_})
    with pytest.raises(UsageError, match="transformers"):
        StreamCache.for_model(torch.nn.Linear(2, 2))
    compiled = tiny.llama()
    compiled.compile()
    with pytest.raises(UsageError, match="compiled"):
        StreamCache.for_model(compiled, cache=32)
    other_model = tiny.llama()
    with StreamCache.for_model(model, cache=32) as mine, StreamCache.for_model(other_model, cache=32):
        with pytest.raises(UserError, match="another model"):
            call(other_model, prompt(3), mine)
        with pytest.raises(UserError, match="rows"):
            call(model, prompt(3), mine)
            call(model, prompt(3, batch=2), mine)
        with pytest.raises(UsageError, match="no_grad"):
            model(input_ids=prompt(3), **{cache_argument(model): mine})


def test_everything_is_kept_only_as_far_as_the_model_was_trained():
    model = tiny.llama(positions=64)
    with StreamCache.for_model(model, policy="full", chunk=16) as cache:
        assert torch.equal(generate(model, prompt(20), cache, new=44), generate(model, prompt(20), new=44))
        with pytest.raises(UserError, match="longer than the 64 tokens"):
            call(model, prompt(9), cache)


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_however_many_tokens_there_are_slots_and_bytes_stay_the_same(count):
    model = tiny.llama(heads=2, kv_heads=1, layers=1, positions=64)
    with StreamCache.for_model(model, cache=24, chunk=16, evict_every=8) as cache:
        sizes = set()
        ids = prompt(4)
        with torch.inference_mode():
            for _ in range(count):
                ids = model(input_ids=ids, **{cache_argument(model): cache}, logits_to_keep=1).logits.argmax(-1)
                sizes.add((cache.kv_bytes, cache.slots))
        assert len({size for size, _ in sizes}) == 1
        assert {slots for _, slots in sizes} <= set(range(4, 32))
        assert cache.get_seq_length() == count + 3
        assert cache.max_slots == 32


def test_a_copy_goes_on_by_itself():
    model, ids = tiny.llama(), prompt(30)
    with StreamCache.for_model(model, cache=16, chunk=8) as cache:
        call(model, ids, cache)
        other = copy.deepcopy(cache)
        first = call(model, prompt(5, seed=1), cache)
        call(model, prompt(5, seed=2), cache)
        assert torch.equal(call(model, prompt(5, seed=1), other), first)
        assert (other.tokens, cache.tokens) == (35, 40)
        other.detach()
        with pytest.raises(UserError, match="detached"):
            copy.deepcopy(other)


@pytest.mark.parametrize("protocol", [copy.copy, pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())])
def test_what_would_copy_it_otherwise_is_refused_with_what_to_do(protocol):
    model = tiny.llama()
    with StreamCache.for_model(model, cache=16) as cache, pytest.raises(UserError, match="write it to a file"):
        protocol(cache)
    with ChunkStream(model, make_policy("h2o", 16)) as stream, pytest.raises(UserError, match="load_state"):
        protocol(stream)


@pytest.mark.parametrize("policy", ["streamh2o", "topk"])
def test_a_saved_cache_goes_on_with_the_same_digits(tmp_path, policy):
    model, path = tiny.llama(), tmp_path / "cache.safetensors"
    mask = torch.tensor([[1] * 30, [0] * 4 + [1] * 26])
    ids, more = prompt(30, batch=2), prompt(1, batch=2, seed=1)
    with StreamCache.for_model(model, cache=16, policy=policy, chunk=8) as cache:
        call(model, ids, cache, attention_mask=mask)
        cache.save(path)
        expected = call(model, more, cache)
    with StreamCache.load(path, model) as cache:
        assert (cache.tokens, cache.policy.name) == (30, policy)
        assert torch.equal(call(model, more, cache), expected)


def test_a_file_of_another_model_or_none_at_all_is_refused(tmp_path):
    model, path = tiny.llama(), tmp_path / "cache.safetensors"
    with StreamCache.for_model(model, cache=16) as cache:
        call(model, prompt(5), cache)
        cache.save(path)
        with pytest.raises(UserError, match="can't be written"):
            cache.save(tmp_path / "nowhere" / "cache.safetensors")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    with pytest.raises(UserError, match="another model"):
        StreamCache.load(path, other)
    with pytest.raises(UserError, match="can't be read"):
        StreamCache.load(tmp_path / "nothing", model)
    path.write_bytes(b"no such thing")
    with pytest.raises(UserError, match="can't be read"):
        StreamCache.load(path, model)


def test_a_copy_of_a_model_that_is_lent_is_the_models_own():
    model, ids = tiny.llama(), tiny.tokens(20)
    with torch.no_grad():
        expected = model(ids).logits
    with StreamCache.for_model(model, cache=8):
        other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
        assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(other(ids).logits, expected)


def test_a_text_that_does_not_go_on_after_what_was_read_is_refused():
    model = tiny.llama()
    with StreamCache.for_model(model, cache=16, chunk=8) as cache:
        found = generate(model, prompt(20), cache, new=5)
        for length in (10, 20, 24):  # 24 tokens have been read; the last that was chosen has not
            with pytest.raises(UserError, match="does not go on after the 24 tokens"):
                generate(model, prompt(length), cache, new=5)
        with pytest.raises(UserError, match="does not go on"):
            call(model, prompt(20)[:, :0], cache)
        assert generate(model, found, cache, new=5).shape == (1, 30)


def test_a_model_in_training_mode_or_without_numbers_is_refused():
    model, ids = tiny.llama(), prompt(20)
    with StreamCache.for_model(model, cache=16) as cache:
        model.train()
        with pytest.raises(UsageError, match="training mode"):
            call(model, ids, cache)
        model.eval()
        call(model, ids, cache)
    model.model.layers[1].to("meta")
    with pytest.raises(UserError, match="meta"):
        StreamCache.for_model(model, cache=16)
    with pytest.raises(UserError, match="meta"):
        ChunkStream(model, make_policy("h2o", 16))
