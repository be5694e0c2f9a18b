"""The byte-level BPE tokenizer that a GGUF file carries, as `tokenizers` builds it.

`transformers` converts GGUF tokenizers too, but drops the rule for splitting a text before BPE (`tokenizer.ggml.pre`),
and its first releases of version 5 read a byte-level BPE of a Llama as a SentencePiece one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamh2o.models.gguf.header import GgufHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF: special tokens, and words that are never split
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def byte_level_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast | None:
    """The tokenizer of `header`, or None where it is of a kind or has a splitting rule that is not known here.

    It puts a BOS first only where the file says so. Raises KeyError, IndexError or ValueError on a damaged vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    facts = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    splitter = _splitter(str(facts.get("pre"))) if facts.get("model") == "gpt2" else None
    if splitter is None:
        return None
    tokens: list[str] = facts["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges, fuse_unk=False))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, facts.get("token_type", []), strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    named = {f"{name}_token": tokens[facts[key]] for name, key in _SPECIAL.items() if key in facts}
    if facts.get("add_bos_token"):
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, facts["bos_token_id"])]
        )
    template = header.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **named
    )


def _splitter(rule: str) -> Any:
    """How a text is cut before BPE, by llama.cpp's name of the rule; None for a name not known here.

    smollm: digits one by one, then GPT-2's rule, as in the tokenizer.json that SmolLM's authors publish.
    """
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return gpt2
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return None
