"""Folders and GGUF files with tiny random models, for the tests of loading."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from streamh2o.kernels.gguf_blocks import KINDS
from tests import tiny, toy_tokenizers

TEXT = "The quick brown fox\n\n12 jumps over  7 lazy dogs."


def vocabulary_size() -> int:
    return toy_tokenizers.gpt2().get_vocab_size()


def llama(**extra):
    """A Llama of two layers, 4 query and 2 KV heads, with as many words as the toy tokenizer."""
    config = tiny.llama(heads=4, kv_heads=2).config
    for name, value in extra.items():
        setattr(config, name, value)
    config.vocab_size = vocabulary_size()
    return tiny.build(config)


def qwen2(**extra):
    """The same of Qwen2, whose q, k and v have biases."""
    config = tiny.qwen().config
    for name, value in extra.items():
        setattr(config, name, value)
    config.vocab_size = vocabulary_size()
    model = tiny.build(config)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=toy_tokenizers.gpt2(), bos_token="<s>", eos_token="<|im_end|>")


def folder(path: Path, model=None) -> Path:
    """A Hugging Face folder with safetensors and a tokenizer."""
    (model or llama()).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def change_config(path: Path, **values) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def gguf_file(
    path: Path, model, *, rule: str = "gpt-2", bos: bool = False, architecture: str = "llama", blocks=None
) -> Path:
    """`model` as llama.cpp would write it: its names, and of a Llama rotated halves of q and k interleaved.

    rule: tokenizer.ggml.pre. blocks: the type of quantised blocks for the matrices whose rows are whole blocks, random
    ones where the package gguf cannot make that type.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    facts = json.loads(toy_tokenizers.gpt2().to_str())
    special = {token["content"] for token in facts["added_tokens"]}
    words = sorted(facts["model"]["vocab"], key=facts["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in facts["model"]["merges"]])
    writer.add_bos_token_id(words.index("<s>"))
    writer.add_eos_token_id(words.index("<|im_end|>"))
    writer.add_add_bos_token(bos)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}")
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = (_ggml_weight(name, weight, config) if architecture == "llama" else weight).contiguous().numpy()
        if blocks is not None and array.ndim == 2 and array.shape[1] % gguf.GGML_QUANT_SIZES[blocks][0] == 0:
            writer.add_tensor(_ggml_name(name), _quantised(array, blocks), raw_dtype=blocks)
        else:
            writer.add_tensor(_ggml_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantised(array: np.ndarray, blocks: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quants.quantize(array, blocks)
    except NotImplementedError:
        kind, (rows, width) = KINDS[blocks.name], array.shape
        generator = torch.Generator().manual_seed(rows)
        return kind.random(rows, width // kind.weights, generator, scale=2e-4).numpy()


def _ggml_name(name: str) -> str:
    for theirs, ours in (
        *(("model.layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k")),
        *(("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate")),
        *(("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm")),
        *(("post_attention_layernorm", "ffn_norm"), ("model.embed_tokens", "token_embd")),
        *(("model.norm", "output_norm"), ("lm_head", "output")),
    ):
        name = name.replace(theirs, ours)
    return name


def _ggml_weight(name: str, weight: torch.Tensor, config) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
