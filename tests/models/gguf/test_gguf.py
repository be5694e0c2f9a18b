"""GGUF files: dequantised exactly, cached once, and refused in a sentence where they are damaged."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.errors import UserError
from streamh2o.models.find import list_models
from streamh2o.models.gguf import unpacked as gguf_cache
from streamh2o.models.gguf.header import read_header
from streamh2o.models.gguf.tokenizer import byte_level_tokenizer
from streamh2o.models.load import load_model
from tests import model_folders, toy_tokenizers


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return model_folders.gguf_file(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model_folders.llama())


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cached(made, shared_cache, monkeypatch) -> Path:
    """`made`, with a cache where it lies unpacked from the first test on."""
    monkeypatch.setenv("STREAMH2O_CACHE", str(shared_cache))
    return made


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STREAMH2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_gives_the_model_it_was_made_from(cached):
    loaded = load_model(str(cached), dtype="float32", device="cpu")
    ids = torch.tensor([loaded.tokenizer(model_folders.TEXT).input_ids])
    torch.testing.assert_close(loaded.model(ids).logits, model_folders.llama()(ids).logits, rtol=0, atol=1e-5)
    assert loaded.trained_positions == 512


def test_its_tokenizer_has_the_ids_special_tokens_and_chat_template_of_the_file(cached):
    tokenizer = load_model(str(cached), device="cpu").tokenizer
    assert tokenizer(model_folders.TEXT).input_ids == toy_tokenizers.gpt2().encode(model_folders.TEXT).ids
    assert tokenizer.decode(tokenizer(model_folders.TEXT).input_ids) == model_folders.TEXT
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")
    talk = [{"role": "user", "content": "fox"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "fox<|im_end|>"


@pytest.mark.parametrize("bos", [False, True])
def test_a_bos_is_put_first_only_where_the_file_says_so(made, tmp_path, bos):
    path = model_folders.gguf_file(tmp_path / "bos.gguf", model_folders.llama(), bos=bos)
    tokenizer = byte_level_tokenizer(read_header(path))
    plain = toy_tokenizers.gpt2().encode("fox").ids
    assert tokenizer("fox").input_ids == [tokenizer.bos_token_id] * bos + plain
    assert tokenizer("fox", add_special_tokens=False).input_ids == plain


def test_the_splitting_rule_the_file_names_is_obeyed(tmp_path):
    path = model_folders.gguf_file(tmp_path / "rule.gguf", model_folders.llama(), rule="smollm")
    pieces = byte_level_tokenizer(read_header(path)).tokenize("x  12")
    assert pieces == ["x", "ĠĠ", "1", "2"]  # GPT-2's rule gives "Ġ", "Ġ12" to the merges


def test_an_unknown_splitting_rule_is_left_to_transformers(tmp_path):
    path = model_folders.gguf_file(tmp_path / "rule.gguf", model_folders.llama(), rule="of-next-year")
    assert byte_level_tokenizer(read_header(path)) is None


def test_blocks_of_four_bits_are_kept_exactly(tmp_path, empty_cache):
    model = model_folders.llama()
    kind = gguf.GGMLQuantizationType.Q4_1
    path = model_folders.gguf_file(tmp_path / "q4.gguf", model, blocks=kind)
    loaded = load_model(str(path), dtype="float32", device="cpu")
    weight = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    assert not np.array_equal(weight, expected)
    assert np.array_equal(loaded.model.model.layers[0].mlp.up_proj.weight.numpy(), expected)


def test_the_second_start_reads_the_cache(cached, capfd):
    gguf_cache.safetensors_folder(cached)
    folder = gguf_cache.cached_folder(cached)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    capfd.readouterr()
    load_model(str(cached), device="cpu")
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert capfd.readouterr() == ("", "")


def test_the_cache_is_private(made, empty_cache):
    gguf_cache.safetensors_folder(made)
    folder = gguf_cache.cached_folder(made)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_the_key_holds_size_date_and_our_version(made, tmp_path, empty_cache, monkeypatch):
    path = Path(shutil.copy2(made, tmp_path / "tiny.gguf"))
    keys = [gguf_cache.cached_folder(path)]
    os.utime(path, (1, 1))
    keys.append(gguf_cache.cached_folder(path))
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, (1, 1))
    keys.append(gguf_cache.cached_folder(path))
    monkeypatch.setattr(gguf_cache, "__version__", "99")
    keys.append(gguf_cache.cached_folder(path))
    assert len(set(keys)) == 4


def test_a_cut_file_in_the_cache_is_made_again(made, empty_cache):
    folder = gguf_cache.safetensors_folder(made)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert gguf_cache.safetensors_folder(made) == folder
    assert (folder / "model.safetensors").read_bytes() == whole


def test_two_processes_at_once_leave_one_whole_copy(made, empty_cache):
    code = "import sys; from streamh2o.models.find import model_folder; model_folder(sys.argv[1])"
    both = [subprocess.Popen([sys.executable, "-c", code, str(made)], stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        process.communicate(timeout=300)
    assert [process.returncode for process in both] == [0, 0]
    assert [folder.name for folder in gguf_cache.models_home().iterdir()] == [gguf_cache.cached_folder(made).name]
    assert gguf_cache.read_mark(gguf_cache.cached_folder(made))


def test_a_failure_leaves_nothing_behind(tmp_path, empty_cache):
    path = model_folders.gguf_file(tmp_path / "bert.gguf", model_folders.llama(), architecture="bert")
    with pytest.raises(UserError, match="bert"):
        load_model(str(path))
    assert list(gguf_cache.models_home().iterdir()) == []


def test_what_a_killed_run_left_is_removed_a_day_later(made, empty_cache):
    old, new = gguf_cache.models_home() / ".unfinished-old", gguf_cache.models_home() / ".unfinished-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    gguf_cache.safetensors_folder(made)
    assert not old.exists()
    assert new.exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(made, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STREAMH2O_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written .*set STREAMH2O_CACHE"):
        load_model(str(made))


def test_an_unpacked_gguf_is_listed(cached):
    gguf_cache.safetensors_folder(cached)
    (line,) = [model for model in list_models() if model.kind == "gguf"]
    assert (line.name, line.ready) == (str(cached.resolve()), True)
    assert line.size > cached.stat().st_size / 2


def test_the_header_tells_shapes_and_metadata(made):
    header = read_header(made)
    assert header.architecture == "llama"
    assert header.metadata["llama.context_length"] == 512
    assert header.tensors["blk.0.attn_k.weight"][0] == (32, 16)  # ggml writes the inner dimension first
    assert len(header.metadata["tokenizer.ggml.tokens"]) == model_folders.vocabulary_size()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 10, b"GGUF" + b"\xff" * 100, b"GGUF" + bytes(100)])
def test_what_is_no_gguf_is_refused(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match="is not a whole GGUF file"):
        load_model(str(tmp_path / "x.gguf"))


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(made, tmp_path_factory, share):
    whole = made.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(whole[: int(share * (len(whole) - 64))])
    with pytest.raises(UserError, match="is not a whole GGUF file"):
        read_header(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_changed_header_is_read_or_refused_but_never_crashes(made, tmp_path_factory, data):
    content = bytearray(made.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 12_000))
        content[place : place + 1] = data.draw(st.binary(min_size=0, max_size=9))
    path = tmp_path_factory.mktemp("changed") / "changed.gguf"
    path.write_bytes(content)
    with contextlib.suppress(UserError), gguf_cache.readable_errors("it"):
        byte_level_tokenizer(read_header(path))
