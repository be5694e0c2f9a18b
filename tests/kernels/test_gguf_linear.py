"""Weights in the blocks of a GGUF file: the numbers of the unpacked file in less memory, or a refusal."""

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from streamh2o.errors import UsageError, UserError
from streamh2o.kernels import compiled
from streamh2o.kernels import gguf_linear as packed_weights
from streamh2o.kernels.gguf_blocks import KINDS
from streamh2o.kernels.gguf_linear import GgufEmbedding, GgufLinear
from streamh2o.kernels.select import Kernel, select
from streamh2o.models.find import NAMED
from streamh2o.models.gguf import packed as packed_cache
from streamh2o.models.gguf.unpacked import cached_packed, list_cached
from streamh2o.models.load import load_model
from streamh2o.models.self_test import streamed
from streamh2o.stream.engine.fused import fused
from tests import model_folders, tiny
from tests.call import one_sentence
from tests.tiny_folder import make_book


def some_blocks(kind: str, rows: int, across: int, seed: int, scale: float = 0.1) -> torch.Tensor:
    """Random blocks [rows, bytes]: any integers, scales and minima of both signs."""
    return KINDS[kind].random(rows, across, torch.Generator().manual_seed(seed), scale)


def reference(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    number = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), number))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, 5),
    across=st.integers(1, 4),
    scale=st.sampled_from([1e-6, 0.1, 1e4]),
    seed=st.integers(0, 999),
)
def test_blocks_stand_for_the_numbers_that_gguf_says(kind, rows, across, scale, seed):
    blocks = some_blocks(kind, rows, across, seed, scale)
    found, expected = KINDS[kind].unpacked(blocks), reference(kind, blocks)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # zeros of the same sign too
    assert KINDS[kind].width(blocks) == across * KINDS[kind].weights


@pytest.mark.usefixtures("built")
@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.one_of(st.integers(1, 10), st.integers(11, 600)),
    words=st.one_of(st.integers(1, 40), st.integers(41, 700)),
    across=st.integers(1, 20),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_products_are_those_of_the_unpacked_weights(kind, rows, words, across, biased, dtype, seed):
    blocks, generator = some_blocks(kind, words, across, seed), torch.Generator().manual_seed(seed)
    bias = torch.randn(words, generator=generator).to(dtype).float() if biased else None
    x = torch.randn(rows, across * KINDS[kind].weights, generator=generator).to(dtype)
    layer = GgufLinear(blocks, KINDS[kind], bias, dtype, select("compiled"))
    if not layer.compiled(x):
        pytest.skip("this processor has no such products")
    weight = reference(kind, blocks).to(dtype)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    within = 1e-5 if dtype == torch.float32 else 2**-8  # of bfloat16 the last step, once
    most = functional.linear(x.double().abs(), weight.double().abs())  # what rounding of sums is measured by
    assert ((layer(x) - expected).abs() <= within * expected.abs() + 1e-5 * most + 1e-6).all()


@pytest.mark.usefixtures("built")
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    words=st.integers(1, 300),
    together=st.integers(1, 128),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_losses_are_those_of_all_logits_at_once(rows, words, together, biased, seed):
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(words, generator=generator) if biased else None
    layer = GgufLinear(
        some_blocks("Q8_0", words, 2, seed, 0.01), KINDS["Q8_0"], bias, torch.float32, select("compiled")
    )
    x, targets = torch.randn(rows, 64, generator=generator), torch.randint(0, words, (rows,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_weights, "WORDS", together)
        for _ in range(2):
            expected = functional.cross_entropy(layer(x), targets, reduction="none")
            assert torch.allclose(layer.losses(x, targets), expected, atol=1e-4)
            layer.to(torch.bfloat16)  # the bias


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_is_not_hidden(rows, dtype):
    layer = GgufLinear(some_blocks("Q4_1", 50, 3, 0), KINDS["Q4_1"], None, dtype, select("compiled"))
    x = torch.randn(rows, 96).to(dtype)
    x[rows // 2, 5] = float("nan")
    assert layer(x)[rows // 2].isnan().all()
    assert layer.losses(x, torch.zeros(rows, dtype=torch.int64)).isnan().nonzero().tolist() == [[rows // 2]]


def test_a_kernel_that_multiplies_wrongly_is_not_used(monkeypatch):
    monkeypatch.setattr(compiled, "packed_linear", lambda x, blocks, kind, bias: x.new_zeros(len(x), len(blocks)))
    packed_weights._sound.cache_clear()
    layer = GgufLinear(
        some_blocks("Q4_0", 3, 1, 0), KINDS["Q4_0"], None, torch.float32, Kernel(frozenset({torch.float32}))
    )
    x = torch.randn(2, 32)
    try:
        assert torch.allclose(layer(x), x @ reference("Q4_0", layer.blocks).T, atol=1e-5)
    finally:
        packed_weights._sound.cache_clear()


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STREAMH2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_gguf(folder: Path, kind: str = "Q4_1", model=model_folders.llama, **extra) -> Path:
    """A tiny file whose matrices are all of `kind`, unless sizes in `extra` are no whole number of blocks."""
    blocks = gguf.GGMLQuantizationType[kind]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if KINDS[kind].weights == 256 else {}
    made = model(**{"intermediate_size": 64, **sizes, **extra})
    return model_folders.gguf_file(folder / "tiny.gguf", made, architecture=made.config.model_type, blocks=blocks)


@pytest.mark.parametrize(
    ("kind", "model", "tied"),
    [
        *((kind, model_folders.llama, False) for kind in sorted(KINDS)),
        *((kind, model_folders.llama, True) for kind in ("Q4_1", "Q6_K")),
        *((kind, model_folders.qwen2, False) for kind in ("Q5_0", "Q8_0")),
    ],
)
def test_a_file_kept_packed_is_the_model_of_the_unpacked_one(tmp_path, own_cache, kind, model, tied):
    path = str(make_gguf(tmp_path, kind, model, tie_word_embeddings=tied))
    plain, packed = (
        load_model(path, "float32", "cpu", weights=weights, kernel="torch") for weights in ("plain", "packed")
    )
    ids = tiny.tokens(70)
    # Without the kernel it is the same arithmetic, whatever order llama.cpp has put the rows of q and k in.
    expected = plain.model(ids).logits
    assert expected.isfinite().all()
    assert torch.equal(packed.model(ids).logits, expected)
    assert not any(isinstance(module, torch.nn.Linear | torch.nn.Embedding) for module in packed.model.modules())
    linear = [module for module in packed.model.modules() if isinstance(module, GgufLinear)]
    assert (len(linear), sum(layer.bias is not None for layer in linear)) == (15, 6 * (model is model_folders.qwen2))
    assert sum(isinstance(module, GgufEmbedding) for module in packed.model.modules()) == 1
    (before, after) = (loaded.info() for loaded in (plain, packed))
    assert (before.pop("weights"), after.pop("weights")) == ("plain", "packed")
    assert after.pop("weight_bytes") < before.pop("weight_bytes") / 3
    assert before == after
    assert packed.model.generation_config.eos_token_id == plain.model.generation_config.eos_token_id


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize(("kind", "model"), [("Q4_1", model_folders.llama), ("Q8_0", model_folders.qwen2)])
def test_a_stream_of_it_has_the_losses_of_the_unpacked_one(tmp_path, own_cache, kind, model, chunk):
    from streamh2o.policies import make_policy

    path, policy = str(make_gguf(tmp_path, kind, model)), make_policy("h2o", 24)
    plain, packed = (load_model(path, "float32", "cpu", weights=weights) for weights in ("plain", "packed"))
    expected, _, _ = streamed(plain, policy, tiny.tokens(60), chunk)
    found, evictions, _ = streamed(packed, policy, tiny.tokens(60), chunk)
    assert torch.allclose(found, expected, atol=1e-4)
    assert evictions
    assert (
        len(
            [
                module
                for module in fused(packed.model.model, packed.kernel)._forwards
                if "MLP" in type(module[0]).__name__
            ]
        )
        == 2
    )


def test_the_blocks_are_laid_down_once_beside_the_unpacked_copy(tmp_path, own_cache, capfd):
    path = make_gguf(tmp_path)
    load_model(str(path), "float32", "cpu", weights="packed")
    assert "Packing tiny.gguf into the cache, once ..." in capfd.readouterr().err
    load_model(str(path), "bfloat16", "cpu", weights="packed")
    assert capfd.readouterr().err == ""
    file = cached_packed(path) / packed_cache.FILE
    (cached,) = list_cached()
    assert cached.size > file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    load_model(str(path), "float32", "cpu", weights="packed")
    assert "once ..." in capfd.readouterr().err


def test_matrices_without_blocks_stay_plain_and_that_is_said(tmp_path, own_cache, capfd):
    path = str(make_gguf(tmp_path, intermediate_size=48))  # 48 columns are no whole number of blocks
    packed = load_model(path, "float32", "cpu", weights="packed")
    said = "weights: 14 matrices stay packed, and 2 do not (F32)\n"
    assert capfd.readouterr().err.endswith(said)
    assert type(packed.model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    ids = tiny.tokens(20)
    assert torch.equal(packed.model(ids).logits, load_model(path, "float32", "cpu").model(ids).logits)


def test_what_has_no_blocks_is_refused_in_a_sentence(tmp_path, own_cache, streamh2o):
    book = make_book(tmp_path)
    folder = model_folders.folder(tmp_path / "folder")
    code, _, err = streamh2o("ppl", book, "--model", folder, "--weights", "packed", "--device", "cpu")
    sentence = one_sentence(err)
    assert (code, sentence) == (2, f"--weights packed is for GGUF files, and {folder} is none; leave it out.")
    code, _, err = streamh2o("ppl", book, "--weights", "int3")
    assert (code, one_sentence(err)) == (2, "--weights int3: must be plain or packed.")
    path = model_folders.gguf_file(tmp_path / "float.gguf", model_folders.llama())
    with pytest.raises(UserError, match=r"its matrices are F32, and those that can are Q4_0, Q4_1, .*, Q6_K; leave"):
        load_model(str(path), device="cpu", weights="packed")
    with pytest.raises(UsageError, match=r"for one CPU, and --device-map"):
        load_model(str(path), device_map="auto", weights="packed")
    with pytest.raises(UsageError, match=r"--weights int3: must be plain or packed\."):
        load_model(str(path), weights="int3")


def test_a_run_is_resumed_with_the_weights_it_began_with(tmp_path, own_cache, streamh2o):
    path, book = make_gguf(tmp_path), make_book(tmp_path)
    run = ("ppl", book, "--model", path, "--cache", "64", "--chunk", "32", "--device", "cpu", "--threads", "1")
    run = (*run, "--kernel", "torch", "--max-tokens", "100", "--checkpoint", tmp_path / "saved")
    code, out, _ = streamh2o(*run, "--weights", "packed", "--json", "-")
    assert code == 0
    assert '"weights": "packed"' in out
    code, _, err = streamh2o(*run, "--resume")
    sentence = one_sentence(err)
    assert code == 2
    assert sentence == "--weights was packed at the checkpoint and is plain now; resume with the same options."
    code, again, _ = streamh2o(*run, "--weights", "packed", "--resume", "--json", "-")
    assert (code, again) == (0, out)


def test_doctor_says_what_the_weights_are(tmp_path, own_cache, streamh2o):
    path = make_gguf(tmp_path)
    _, out, _ = streamh2o("doctor", "--model", path, "--device", "cpu", "--threads", "1", "--weights", "packed")
    assert "weights:      packed, 16 matrices of Q4_1, " in out
    _, out, _ = streamh2o("doctor", "--model", path, "--device", "cpu", "--threads", "1")
    assert "weights:      plain, " in out


@pytest.mark.usefixtures("built")
@pytest.mark.skipif(NAMED["smollm2-135m"].path() is None, reason="streamh2o models get smollm2-135m")
def test_the_real_model_says_the_same_in_a_fifth_of_the_memory():
    from streamh2o.policies import make_policy

    plain, packed = (load_model(dtype="float32", device="cpu", weights=weights) for weights in ("plain", "packed"))
    text = (Path(__file__).parents[2] / "data" / "sample.txt").read_text("utf-8")[:4000]
    ids = torch.tensor([plain.tokenizer(text).input_ids[:500]])
    (expected, _, _), (found, _, _) = (
        streamed(loaded, make_policy("streamingllm", 256), ids, 128) for loaded in (plain, packed)
    )
    assert torch.allclose(found, expected, atol=2e-3)
    assert abs(found.mean() - expected.mean()) < 1e-5
    assert packed.info()["weight_bytes"] < 0.2 * plain.info()["weight_bytes"]
    last = [loaded.model(ids[:, -40:]).logits[:, -1].argmax() for loaded in (plain, packed)]
    assert last[0] == last[1]
