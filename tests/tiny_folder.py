"""A model folder as `--model` takes it: a random Llama of two layers with a byte-level tokenizer, 512 positions."""

from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.tiny import build
from tests.toy_tokenizers import gpt2

TEXT = "The quick brown fox jumps over the lazy dog. It's 1234567 times better, they'll say; we've seen it!\n"


def make_folder(folder: Path, bos: bool = False, broken_token: str | None = None, positions: int = 512) -> Path:
    """Write the model to `folder`. bos: its tokenizer puts one first. broken_token: its embedding is not a number."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gpt2(), bos_token="<s>" if bos else None)
    if bos:
        from tokenizers.processors import TemplateProcessing

        start = tokenizer.convert_tokens_to_ids("<s>")
        post = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
        tokenizer.backend_tokenizer.post_processor = post
    model = build(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    if broken_token is not None:
        model.model.embed_tokens.weight.data[tokenizer.convert_tokens_to_ids(broken_token)] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_book(folder: Path, name: str = "book.txt") -> Path:
    """A text of six numbered repetitions, 228 tokens of the tokenizer of `make_folder`."""
    path = folder / name
    path.write_text("".join(f"{number}. {TEXT}" for number in range(6)))
    return path
