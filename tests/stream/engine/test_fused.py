"""What stands in for a model's modules while it works for us: the same numbers, and nothing left behind."""

import copy

import pytest
import torch
from torch import nn

from streamh2o.kernels.select import TORCH, select
from streamh2o.models.self_test import transformers_losses
from streamh2o.policies import make_policy
from streamh2o.stream.engine.fused import fused
from streamh2o.stream.stream_cache import StreamCache
from tests import families, tiny
from tests.cache.test_families import CASES, runs

pytestmark = pytest.mark.usefixtures("built")


def replaced(model):
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [case.name for case in families.CASES if runs(case.family)])
def test_every_family_has_the_same_losses_with_it(name, dtype):
    model = CASES[name].model()
    # Scores that round otherwise would evict otherwise.
    ids, policy = tiny.tokens(60), make_policy("h2o" if dtype == torch.float32 else "streamingllm", 24)
    exact = tiny.stream_losses(model, policy, ids, 8, kernel="torch")
    model = model.to(dtype)
    before = transformers_losses(model, ids[:, :20])
    expected = tiny.stream_losses(model, policy, ids, 8, kernel="torch")
    found = tiny.stream_losses(model, policy, ids, 8, kernel="compiled")
    if dtype == torch.float32:
        assert torch.allclose(found, expected, atol=1e-4)
    else:
        error, usual = ((losses - exact).abs().mean() for losses in (found, expected))
        assert error < 1.5 * usual + 0.01
    assert not replaced(model)
    assert torch.equal(transformers_losses(model, ids[:, :20]), before)


@pytest.mark.parametrize(("dtype", "linear"), [(torch.float32, 0), (torch.bfloat16, 7)])
def test_norms_gates_and_in_bfloat16_linear_layers_are_replaced(dtype, linear):
    model = tiny.llama().to(dtype)
    layers = model.config.num_hidden_layers
    assert not fused(model.model, TORCH)._forwards
    fused(model.model, select("compiled")).on()
    names = replaced(model)
    fused(model.model, select("compiled")).off()
    assert names.count("LlamaRMSNorm") == 2 * layers + 1
    assert names.count("LlamaMLP") == layers
    assert names.count("Linear") == linear * layers
    assert not replaced(model)


def test_a_module_that_gives_something_else_is_left_alone():
    model = tiny.llama()
    norm_class = type(model.model.norm)

    class OtherRMSNorm(norm_class):
        def forward(self, x):
            return super().forward(x) * 1.01

    model.model.norm.__class__ = OtherRMSNorm
    model.model.layers[0].mlp.act_fn = nn.GELU()
    model.model.layers[1].mlp.__dict__["forward"] = model.model.layers[1].mlp.forward  # as accelerate does
    made = fused(model.model, select("compiled"))
    made.on()
    names = replaced(model)
    made.off()
    assert "OtherRMSNorm" not in names
    assert names.count("LlamaMLP") == model.config.num_hidden_layers - 1
    assert "forward" in vars(model.model.layers[1].mlp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [lambda weight: weight.mul_(1.5), lambda weight: weight.data.mul_(1.5)])
def test_weights_that_have_changed_are_seen(dtype, change):
    ids, policy = tiny.tokens(40), make_policy("h2o", 16)
    model = tiny.llama().to(dtype)
    tiny.stream_losses(model, policy, ids, 8, kernel="compiled")
    with torch.no_grad():
        for weight in model.parameters():
            change(weight)
    fresh = copy.deepcopy(model)
    assert torch.equal(
        tiny.stream_losses(model, policy, ids, 8, kernel="compiled"),
        tiny.stream_losses(fresh, policy, ids, 8, kernel="compiled"),
    )


def test_a_model_in_another_number_format_is_looked_at_anew():
    ids, policy = tiny.tokens(40), make_policy("streamingllm", 16)
    model = tiny.llama()
    expected = tiny.stream_losses(model, policy, ids, 8, kernel="compiled")
    half = tiny.stream_losses(model.to(torch.bfloat16), policy, ids, 8, kernel="compiled")
    again = tiny.stream_losses(model.to(torch.float16), policy, ids, 8, kernel="compiled")
    assert (half - expected).abs().mean() < 0.2
    assert (again - expected).abs().mean() < 0.2


def test_norms_and_an_embedding_of_another_number_format_are_not_misread():
    ids, policy = tiny.tokens(40), make_policy("streamingllm", 16)
    model = tiny.llama().to(torch.bfloat16)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone().float())
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    for layer in model.model.layers:
        layer.input_layernorm.float()
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"].bfloat16()}),
            with_kwargs=True,
        )
    expected = tiny.stream_losses(model, policy, ids, 8, kernel="torch")
    assert (tiny.stream_losses(model, policy, ids, 8, kernel="compiled") - expected).abs().mean() < 0.2


def test_a_model_made_in_inference_mode_is_no_different():
    ids, policy = tiny.tokens(40), make_policy("h2o", 16)
    with torch.inference_mode():
        made = tiny.llama().to(torch.bfloat16)
    expected = tiny.stream_losses(tiny.llama().to(torch.bfloat16), policy, ids, 8, kernel="compiled")
    assert torch.equal(tiny.stream_losses(made, policy, ids, 8, kernel="compiled"), expected)


def test_a_stream_cache_leaves_nothing_behind_between_calls():
    model = tiny.llama()
    ids = tiny.tokens(30)
    with StreamCache.for_model(model, cache=16, policy="h2o", kernel="compiled") as cache:
        model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert replaced(model) == ["LlamaForCausalLM", "LlamaModel"], "what waits for passes of other threads"
    assert not replaced(model)


def test_layers_are_not_laid_out_anew_where_memory_is_short(monkeypatch):
    monkeypatch.setattr("streamh2o.kernels.weight_copies.whole_bytes", lambda: 1000)
    model = tiny.llama().to(torch.bfloat16)
    ids, policy = tiny.tokens(40), make_policy("h2o", 16)
    made = fused(model.model, select("compiled"))
    made.on()
    assert "Linear" not in replaced(model)
    made.off()
    short = tiny.stream_losses(model, policy, ids, 8, kernel="compiled")
    monkeypatch.undo()
    assert torch.allclose(short, tiny.stream_losses(copy.deepcopy(model), policy, ids, 8, kernel="compiled"), atol=0.5)


def test_layers_of_llama_s_kind_are_replaced_whole_but_not_where_somebody_listens_inside():
    model = tiny.llama().to(torch.bfloat16)
    first, second = model.model.layers
    heard = []
    handle = second.mlp.register_forward_hook(lambda module, args, output: heard.append(output.shape))
    made = fused(model.model, select("compiled"))
    made.on()
    assert replaced(model).count("LlamaDecoderLayer") == 1
    assert "forward" in vars(first)
    made.off()
    heard.clear()  # of the trial
    tiny.stream_losses(model, make_policy("h2o", 16), tiny.tokens(20), 8, kernel="compiled")
    assert len(heard) == 3
    handle.remove()


def test_a_layer_that_tells_its_attention_more_keeps_its_own_code():
    model = CASES["qwen2-window"].model().to(torch.bfloat16)  # a window in some layers
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert set(windows) == {None, *windows} != {None}
    made = fused(model.model, select("compiled"))
    made.on()
    assert ["forward" in vars(layer) for layer in model.model.layers] == [window is None for window in windows]
    made.off()


def test_a_layer_that_adds_otherwise_keeps_its_own_code():
    model = CASES["granite"].model().to(torch.bfloat16)  # of the same parts, and residuals are multiplied
    made = fused(model.model, select("compiled"))
    made.on()
    assert "forward" not in vars(model.model.layers[0])
    made.off()


@torch.no_grad()
def generated(model, kernel="compiled"):
    """The logits of a pass over 20 tokens with a StreamCache."""
    with StreamCache.for_model(model, cache=16, policy="h2o", kernel=kernel) as cache:
        return model(tiny.tokens(20), past_key_values=cache).logits


def negative(module, args, output):
    return -output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_a_part_that_is_replaced_or_has_a_hook_after_the_first_use_is_heeded(part, dtype):
    class Negative(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

        def forward(self, x):
            return -self.inner(x)

    model = tiny.llama().to(dtype)
    before = generated(model)
    inner = model.model.layers[0].get_submodule(part)
    handle = inner.register_forward_hook(negative)
    hooked = generated(model)
    handle.remove()
    assert torch.equal(generated(model), before)
    model.model.layers[0].set_submodule(part, Negative(inner))
    replaced_part = generated(model)
    expected = generated(model, "torch")
    assert (before - expected).abs().mean() > 0.3
    for found in (hooked, replaced_part):
        assert (found - expected).abs().mean() < (1e-5 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("part", ["", "mlp", "self_attn"])
def test_a_forward_that_somebody_gave_a_part_is_called_and_stays(part):
    model = tiny.llama().to(torch.bfloat16)
    generated(model)
    module, calls = model.model.layers[0].get_submodule(part), []
    own = module.forward

    def counting(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    module.forward = counting
    generated(model)
    generated(model)
    assert len(calls) == 2 * 1
    assert module.forward is counting


def test_norms_that_are_assigned_anew_are_seen():
    model = tiny.llama()
    generated(model)
    other = {name: weight * 1.5 for name, weight in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    assert torch.allclose(generated(model), generated(model, "torch"), atol=1e-3)


@torch.no_grad()
def test_embeddings_of_a_batch_in_pieces_are_taken():
    model = tiny.llama().to(torch.bfloat16)
    embedded = torch.randn(2, 30, model.config.hidden_size).bfloat16()
    with StreamCache.for_model(model, cache=16, policy="h2o", chunk=8, kernel="compiled") as cache:
        assert model(inputs_embeds=embedded, past_key_values=cache).logits.isfinite().all()
