"""What kind of tokenizer this is: where its text may be cut, and whether a cut is surely harmless."""

import json
from dataclasses import dataclass
from typing import Any

# Each of these looks ahead no further than one character past the next run of white space, and never behind.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_SPLITS = {
    _GPT2,
    _CL100K.replace("{DIGITS}", "{1,3}"),  # Llama 3
    _CL100K.replace("{DIGITS}", ""),  # Qwen 2 and 3
    _CL100K.replace("{DIGITS}", "{1,2}"),
    _O200K,
    r"\d",
    r"\d+",
    r"[0-9]",
    r"[0-9]+",
    r"\p{N}",
    r"\p{N}+",
    r"\p{N}{1,3}",
    r"\s",
    r"\s+",
    r"[\r\n]",
    r"[\r\n]+",
}
_OF_WORDS = {"Unigram", "WordPiece", "WordLevel"}
_KNOWN_REPLACEMENTS = {r"\s", r"\s+", r" +", r" {2,}", r"[ ]{2,}", r"\s{2,}"}
_NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Nmt", "Precompiled", "Prepend"),
    *("BertNormalizer", "ByteLevel"),
}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits"}
_PRE_TOKENIZERS |= {"Punctuation", "CharDelimiterSplit"}


@dataclass(frozen=True)
class Traits:
    """exact: cutting by the rules of `tokenize` is known to keep the ids of the whole text.

    splits_words: there is a pre-tokenizer. inside_words: a cut inside a word may be as good as one between words.
    longest_added: characters in the longest added token that text can turn into.
    byte_letters: each letter of a vocabulary entry stands for one byte. byte_fallback: `<0x0A>` stands for one.
    missing_bytes: bytes without a letter, which vanish, so that offsets inside words with them can't be trusted.
    """

    exact: bool
    splits_words: bool
    inside_words: bool
    longest_added: int
    byte_letters: bool
    byte_fallback: bool
    missing_bytes: bytes


def traits(description: str, allow_special: bool) -> Traits:
    """The traits of a tokenizer from its JSON (`tokenizers.Tokenizer.to_str`)."""
    parts = json.loads(description)
    model = parts["model"]
    normalizers = _flat(parts.get("normalizer"), "normalizers")
    pre_tokenizers = _flat(parts.get("pre_tokenizer"), "pretokenizers")
    kind = model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else "BPE")
    merging = kind == "BPE" and not model.get("dropout")
    splits = any(not (part["type"] == "Metaspace" and not part.get("split", True)) for part in pre_tokenizers)
    added = [token["content"] for token in parts.get("added_tokens", ()) if allow_special or not token["special"]]
    known = all(map(_known_normalizer, normalizers)) and all(map(_known_pre_tokenizer, pre_tokenizers))
    letters = any(part["type"] == "ByteLevel" for part in (*pre_tokenizers, *normalizers))
    # Without an id for the unknown, unknown characters vanish, and offsets inside their words go wrong.
    complete = letters or model.get("byte_fallback") or model.get("unk_token") is not None
    return Traits(
        exact=known and ((merging and (splits or complete)) or (splits and kind in _OF_WORDS)),
        splits_words=splits,
        inside_words=(merging and complete) or not splits,
        longest_added=max((len(content) for content in added), default=0),
        byte_letters=letters and all(part["type"] == "ByteLevel" for part in normalizers),
        byte_fallback=bool(model.get("byte_fallback")),
        missing_bytes=_missing_bytes(model["vocab"]) if letters and kind == "BPE" else b"",
    )


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [leaf for child in part[key] for leaf in _flat(child, key)] if part["type"] == "Sequence" else [part]


def _known_normalizer(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"]
        return "String" in pattern or pattern.get("Regex") in _KNOWN_REPLACEMENTS
    return part["type"] in _NORMALIZERS


def _known_pre_tokenizer(part: dict[str, Any]) -> bool:
    if part["type"] == "Split":
        pattern = part["pattern"]
        return "String" in pattern or pattern.get("Regex") in _KNOWN_SPLITS
    return part["type"] in _PRE_TOKENIZERS


def _missing_bytes(vocabulary: dict[str, int]) -> bytes:
    """The bytes that a byte-level vocabulary has no letter for (rare control characters, in some)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return bytes(byte for byte, letter in letters.items() if letter not in vocabulary)
