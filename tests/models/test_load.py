"""Names to loaded models: what is loaded, what is refused, and with which sentence."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig

from streamh2o.errors import UserError
from streamh2o.models import load as models
from streamh2o.models.load import load_model
from tests import model_folders, tiny, toy_tokenizers


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return model_folders.folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_a_folder_gives_the_model_that_was_saved(saved):
    loaded = load_model(str(saved), dtype="float32", device="cpu")
    ids = torch.tensor([loaded.tokenizer(model_folders.TEXT).input_ids])
    assert torch.equal(loaded.model(ids).logits, model_folders.llama()(ids).logits)
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert ids[0].tolist() == toy_tokenizers.gpt2().encode(model_folders.TEXT).ids


def test_info_says_what_the_model_is(saved):
    loaded = load_model(str(saved), dtype="float32", device="cpu")
    info = json.loads(json.dumps(loaded.info()))
    shape = {key: info[key] for key in ("architecture", "layers", "heads", "kv_heads", "head_dim", "trained_positions")}
    assert shape == {
        **{"architecture": "llama", "layers": 2, "heads": 4, "kv_heads": 2},
        **{"head_dim": 8, "trained_positions": 512},
    }
    assert info["parameters"] == sum(weight.numel() for weight in model_folders.llama().parameters())
    assert info["vocabulary"] == model_folders.vocabulary_size()
    assert (loaded.trained_positions, loaded.dtype, loaded.device) == (512, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_weights_come_in_the_asked_dtype(saved, name):
    loaded = load_model(str(saved), dtype=name, device="cpu")
    assert {weight.dtype for weight in loaded.model.parameters()} == {loaded.dtype} == {getattr(torch, name)}


def test_loading_prints_nothing(saved, capfd):
    load_model(str(saved), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_a_long_text_gives_no_warning_about_the_window(copy, capfd):
    (copy / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((copy / "tokenizer_config.json").read_text()), "model_max_length": 8})
    )
    assert len(load_model(str(copy), device="cpu").tokenizer("word " * 50).input_ids) > 8
    assert capfd.readouterr().err == ""


def test_a_pickle_is_refused_before_it_is_opened(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch stolen'\ntR.")
    with pytest.raises(UserError, match=r"pickle \(pytorch_model\.bin\).* only safetensors and GGUF are loaded"):
        load_model(str(copy))
    with pytest.raises(UserError, match=r"only folders with safetensors and .gguf files"):
        load_model(str(copy / "pytorch_model.bin"))


def _with_code(folder: Path) -> Path:
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaForCausalLM, LlamaConfig\n"
        f"Path({str(folder / 'ran')!r}).touch()\nclass Own(LlamaForCausalLM):\n    pass\n"
    )
    model_folders.change_config(folder, auto_map={"AutoModelForCausalLM": "own.Own"}, architectures=["Own"])
    return folder


def test_remote_code_never_runs_by_itself(copy, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(copy / "modules"))
    loaded = load_model(str(_with_code(copy)), device="cpu")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert not (copy / "ran").exists()


def test_remote_code_runs_where_it_is_trusted(copy):
    loaded = load_model(str(_with_code(copy)), device="cpu", trust_remote_code=True)
    assert type(loaded.model).__name__ == "Own"
    assert (copy / "ran").exists()


@pytest.mark.parametrize("kind", ["mamba", "t5", "a_model_of_next_year"])
def test_an_architecture_that_is_not_supported_is_refused_by_name_with_those_that_are(copy, kind):
    model_folders.change_config(copy, model_type=kind)
    with pytest.raises(UserError, match=f"'{kind}' model.*supported are .*gpt_neox.*llama.*mistral.*qwen2.*qwen3"):
        load_model(str(copy))


@pytest.mark.parametrize("window", [None, 512, 12])
def test_mistral_runs_with_a_window_and_without(tmp_path, window):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MistralConfig(
        **sizes,
        vocab_size=model_folders.vocabulary_size(),
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=window,
    )
    model_folders.folder(tmp_path, tiny.build(config))
    assert load_model(str(tmp_path), device="cpu").info()["architecture"] == "mistral"


def test_a_missing_weight_is_noticed(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of its weights \(model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(copy))


@pytest.mark.parametrize("kept", [0, 4, 1000, -100])
def test_cut_weights_are_one_sentence(copy, kept):
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:kept])
    with pytest.raises(UserError, match="cannot be loaded: ") as error:
        load_model(str(copy))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no model.safetensors, so it is no model folder"),
        ("token*", "holds no tokenizer"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(copy, missing, sentence):
    for file in copy.glob(missing):
        file.unlink()
    with pytest.raises(UserError, match=sentence):
        load_model(str(copy))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": 3}', '{"hidden_size": 8}'])
def test_a_damaged_configuration_is_one_sentence(copy, content):
    (copy / "config.json").write_text(content)
    with pytest.raises(UserError):
        load_model(str(copy))


def test_a_damaged_tokenizer_is_one_sentence(copy):
    (copy / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(UserError, match=r"tokenizer of .* cannot be loaded"):
        load_model(str(copy), device="cpu")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where/at/all", "gone.gguf", "two words", "", "\x00"])
def test_a_name_of_nothing_says_how_to_list_models(name):
    with pytest.raises(UserError, match=r"no model file or folder.*streamh2o models"):
        load_model(name)


def test_a_folder_with_a_gguf_says_to_name_the_file(tmp_path):
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(UserError, match=r"name the file itself: .*tiny\.gguf"):
        load_model(str(tmp_path))


def test_the_fingerprint_is_of_the_content_not_of_place_or_date(saved, copy):
    for file in copy.iterdir():
        os.utime(file, (time.time() + 100, time.time() + 100))
    assert models.fingerprint(copy) == models.fingerprint(saved)


def test_the_fingerprint_sees_weights_configuration_and_tokenizer(copy):
    seen = {models.fingerprint(copy)}
    weights = load_file(copy / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, copy / "model.safetensors")
    seen.add(models.fingerprint(copy))
    model_folders.change_config(copy, rms_norm_eps=1e-3)
    seen.add(models.fingerprint(copy))
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    seen.add(models.fingerprint(copy))
    assert len(seen) == 4


def test_a_transformers_outside_the_range_is_named():
    for version in ("4.57.6", "6.0.0", "6.1.0.dev0"):
        with pytest.raises(UserError, match=f"transformers {version} is installed.*5.0 or later, but below 6"):
            models.check_transformers(version)
    for version in ("5.0.0", "5.0.0rc1", "5.24.0", "5.99.1.dev0"):
        models.check_transformers(version)


def test_the_package_declares_the_range_that_is_checked():
    first, end = models.TRANSFORMERS
    assert f'"transformers>={first},<{end}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
