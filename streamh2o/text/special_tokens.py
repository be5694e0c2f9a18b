"""Strings of special tokens in a text as plain text: `<|im_end|>` in a book must not end anything."""

import json
from typing import Any

# Noncharacters, which no text should hold, around a name that no text should spell.
_UNMATCHABLE = "\ufdd0\ufdd1\ufdd0{}\ufdd1\ufdd0\ufdd1"


def specials_as_text(description: str) -> str:
    """The tokenizer (as JSON) without special tokens that its model could find in a text by itself.

    `Tokenizer.encode_special_tokens` keeps special tokens from being cut out of a text before the model sees it.
    But a Unigram or word model, or a BPE that looks whole words up, still finds them, as they are in its vocabulary.
    They keep their ids there, under names that no text matches.
    """
    parts = json.loads(description)
    model = parts["model"]
    if model.get("type") == "BPE" and not model.get("ignore_merges"):
        return description
    vocabulary = model["vocab"]
    inside = set(vocabulary) if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}
    hidden = {
        token["content"]
        for token in parts.get("added_tokens", ())
        if token["special"] and token["content"] in inside and token["content"] != model.get("unk_token")
    }
    model["vocab"] = _renamed(vocabulary, hidden)
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in hidden]
    return json.dumps(parts)


def _renamed(vocabulary: Any, hidden: set[str]) -> Any:
    def name(token: str) -> str:
        return _UNMATCHABLE.format(token) if token in hidden else token

    if isinstance(vocabulary, dict):
        return {name(token): index for token, index in vocabulary.items()}
    return [[name(token), score] for token, score in vocabulary]
