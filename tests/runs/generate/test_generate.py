"""`streamh2o generate`: text and talks without end, and the sampling of transformers."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from streamh2o import StreamCache
from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.runs.generate.characters import Characters
from streamh2o.runs.generate.chat import Chat
from streamh2o.runs.generate.generator import Generator, Sampler
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.stream.chunk_stream import cache_argument
from tests.call import one_sentence
from tests.tiny_folder import TEXT, make_folder
from tests.toy_tokenizers import gpt2

CPU = torch.device("cpu")
PLAIN = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=1)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(streamh2o, folder, *arguments, stdin=None):
    model = ("--model", folder, "--cache", 64, "--chunk", 16, "--dtype", "float32", "--threads", 1)
    return streamh2o("generate", *model, *arguments, stdin=stdin)


@pytest.mark.parametrize(
    "how",
    [
        {"greedy": True, "repetition_penalty": 1.0},
        {"greedy": True, "repetition_penalty": 1.3, "repeat_last": 10_000},
    ],
)
def test_greedy_text_is_that_of_transformers(loaded, how):
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    expected = loaded.model.generate(
        ids, do_sample=False, max_new_tokens=40, repetition_penalty=how["repetition_penalty"]
    )
    with StreamCache.for_model(loaded.model, 256) as cache:
        generator = Generator(loaded, cache, Sampling(**how))
        generator.read(ids[0].tolist())
        assert list(generator.tokens(40)) == expected[0, ids.shape[1] :].tolist()
        assert (generator.read_tokens, generator.new_tokens) == (ids.shape[1], 40)


@settings(max_examples=30, deadline=None)
@given(
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 2, 5, 100]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
)
def test_only_tokens_that_transformers_would_sample_are_sampled(temperature, top_k, top_p, min_p, seed):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 2
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, eos_token_id=None
    )
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    theirs = tiny._get_logits_processor(config, input_ids_seq_length=1)(torch.zeros(1, 1).long(), logits.clone())
    allowed = set(torch.isfinite(theirs)[0].nonzero().flatten().tolist())
    sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, 1.0, 0, False, seed), CPU)
    chosen = [sampler(logits.clone(), torch.zeros(1, 1).long()) for _ in range(200)]
    assert set(chosen) <= allowed
    likeliest = int(theirs.argmax())
    share = float(theirs.softmax(-1)[0, likeliest])
    assert abs(chosen.count(likeliest) / 200 - share) < 0.2


def test_a_seed_gives_the_same_text_again_and_another_one_another(loaded):
    texts = []
    for seed in (1, 1, 2):
        with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
            generator = Generator(loaded, cache, Sampling(seed=seed))
            generator.read([5, 6, 7])
            texts.append(list(generator.tokens(30)))
    assert texts[0] == texts[1] != texts[2]


def test_the_penalty_looks_back_over_the_newest_tokens_only():
    logits = torch.tensor([[5.0, 4.9, 0.0]])
    sampler = Sampler(Sampling(greedy=True, repetition_penalty=2.0), CPU)
    assert sampler(logits.clone(), torch.tensor([[2]])) == 0
    assert sampler(logits.clone(), torch.tensor([[0]])) == 1


def test_a_generator_remembers_as_many_tokens_as_the_penalty_needs(loaded, monkeypatch):
    seen = []
    with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
        generator = Generator(loaded, cache, Sampling(repeat_last=3, seed=1))
        sampler = generator.sampler
        monkeypatch.setattr(generator, "sampler", lambda logits, newest: seen.append(newest) or sampler(logits, newest))
        generator.read(list(range(5, 30)))
        chosen = list(generator.tokens(4))
    assert [each.tolist() for each in seen[:2]] == [[[27, 28, 29]], [[28, 29, chosen[0]]]]
    assert all(each.shape == (1, 3) for each in seen)


def test_text_that_may_not_end_holds_no_token_that_ends_it(loaded):
    with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
        ends = set(range(0, len(loaded.tokenizer), 2))
        generator = Generator(loaded, cache, PLAIN, ends, endless=True)
        generator.read([1, 3])
        assert not ends & set(generator.tokens(50))
    with StreamCache.for_model(loaded.model, 64, chunk=16) as cache:
        generator = Generator(loaded, cache, PLAIN, ends)
        generator.read([1, 3])
        *middle, last = generator.tokens(None)
        assert last in ends
        assert not ends & set(middle)


@given(st.text(max_size=40))
def test_characters_come_whole_and_nothing_is_lost(text):
    tokenizer = load_bytes()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    characters = Characters(tokenizer)
    parts = [characters.feed(token) for token in ids]
    assert "".join(parts) + characters.flush() == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


def load_bytes() -> PreTrainedTokenizerFast:
    from tokenizers.decoders import ByteLevel

    toy = gpt2()
    toy.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=toy)


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    tokenizer = load_bytes()
    half = tokenizer("\U0001f3fd", add_special_tokens=False).input_ids[:1]
    assert tokenizer.decode(half) == "\ufffd"
    characters = Characters(tokenizer)
    assert any(characters.feed(half[0]) for _ in range(20))


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = load_bytes()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_turns_are_what_the_template_makes_of_the_whole_talk():
    tokenizer = chat_tokenizer()
    said, answers = ["Who jumps?", "The fox, over <|im_end|> dogs?", "Yes."], ["A fox.", "It does."]
    chat = Chat(tokenizer, "Be brief.")
    ids = chat.turn(said[0])
    assert ids[: len(chat.pinned)] == chat.pinned
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said[0]}]
    for answer, words in zip(answers, said[1:], strict=True):
        ids += tokenizer(answer).input_ids + chat.turn(words)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": words}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == rendered
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(special) == 6  # system, two turns of two, the last question; not the one that was said


def test_a_system_prompt_stays_in_the_sinks_through_a_long_talk(loaded):
    tokenizer = chat_tokenizer()
    chat = Chat(tokenizer, "Be brief and kind.")
    sinks = len(chat.pinned)
    with StreamCache.for_model(loaded.model, sinks + 40, chunk=16, sinks=sinks) as cache:
        generator = Generator(loaded, cache, PLAIN)
        for _ in range(12):
            generator.read(chat.turn("And the lazy dog?"))
            list(generator.tokens(9))
        (group,) = cache.groups
        assert group.evictions > 3
        for layer in group.slots:
            assert (layer.source_index[:, :, :sinks] == torch.arange(sinks)).all()


def test_a_model_without_a_template_cannot_chat(streamh2o, folder):
    code, _, err = run(streamh2o, folder, "--chat", stdin=b"Hello\n")
    assert code == 1
    assert "no chat template" in one_sentence(err)
    with pytest.raises(UserError, match="leaves out"):
        broken = chat_tokenizer()
        broken.chat_template = "hello"
        Chat(broken)


def test_a_text_is_continued_and_reported(streamh2o, folder, tmp_path):
    book, transcript, result = (tmp_path / name for name in ("book.txt", "transcript.txt", "result.json"))
    book.write_text(TEXT * 20)
    arguments = ("--max-new-tokens", 100, "--seed", 3, "--transcript", transcript, "--json", result)
    code, out, err = run(streamh2o, folder, book, *arguments)
    assert code == 0
    assert out == transcript.read_text("utf-8") != ""
    assert "100 tokens" in err
    assert "at most 80 slots" in err
    figures = json.loads(result.read_text())
    assert figures["new_tokens"] == 100
    assert figures["prompt_tokens"] == len(load_model(folder).tokenizer(TEXT * 20).input_ids)
    assert figures["max_slots"] <= 64 + 16
    assert (figures["stopped"], figures["complete"], figures["sampling"]["seed"]) == ("max-new-tokens", True, 3)
    code, again, _ = run(streamh2o, folder, "-", *arguments[:4], "--quiet", stdin=book.read_bytes())
    assert (code, again) == (0, out)
    code, only, _ = run(streamh2o, folder, "--prompt", TEXT, "--max-new-tokens", 5, "--json", "-", *arguments[4:6])
    assert json.loads(only)["new_tokens"] == 5


def test_a_chat_takes_a_turn_a_line_and_keeps_a_transcript(streamh2o, tmp_path):
    folder = make_folder(tmp_path / "chat")
    chat_tokenizer().save_pretrained(folder)
    transcript, result = tmp_path / "talk.txt", tmp_path / "talk.json"
    code, out, _ = run(
        *(streamh2o, str(folder), "--chat", "--system", "Be kind.", "--max-new-tokens", 6, "--seed", 1, "--cache", 256),
        *("--transcript", transcript, "--json", result),
        stdin="Hello\n\n  \nWho jumps \u00e9?\n".encode(),
    )
    assert code == 0
    text = transcript.read_text("utf-8")
    assert text.startswith("> Hello\n\n")
    assert "> Who jumps \u00e9?\n\n" in text
    answers = text.replace("> Hello\n\n", "").replace("> Who jumps \u00e9?\n\n", "")
    assert out == answers
    assert json.loads(result.read_text())["new_tokens"] <= 12


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "Name one text"),
        (("--prompt", "a", "b.txt"), 2, "Name one text"),
        (("--chat", "--prompt", "a"), 2, "--chat takes no text"),
        (("--system", "a", "--prompt", "b"), 2, "--system belongs to a chat"),
        (("--prompt", "a", "--json", "-"), 2, "--transcript"),
        (("--prompt", "a", "--top-p", "1.5"), 2, "--top-p"),
        (("--prompt", "a", "--temperature", "-1"), 2, "--temperature"),
        (("--prompt", "a", "--greedy", "--temperature", "0.5"), 2, "leave one of them out"),
        (("--prompt", "a", "--chunk", "0"), 2, "it must be at least 1"),
        (("--prompt", "a", "--sinks", "-1"), 2, "--sinks is -1; it must be at least 0"),
        (("--prompt", "a", "--policy", "recompute"), 2, "recompute"),
        (("--prompt", ""), 1, "is empty"),
        (("missing.txt",), 1, "missing.txt"),
        (("--prompt", "a", "--transcript", "no/such/folder.txt"), 2, "no folder"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(streamh2o, folder, arguments, code, words):
    got, out, err = run(streamh2o, folder, *arguments, "--quiet")
    assert (got, out) == (code, "")
    assert words in one_sentence(err)


def test_ctrl_c_ends_an_endless_text_with_its_transcript(folder, tmp_path):
    transcript, result = tmp_path / "t.txt", tmp_path / "r.json"
    command = [sys.executable, "-m", "streamh2o.cli.main", "generate", "--prompt", TEXT, "--model", folder]
    options = ["--max-new-tokens", "0", "--cache", "64", "--chunk", "16", "--dtype", "float32", "--threads", "1"]
    with subprocess.Popen(
        [*command, *options, "--transcript", str(transcript), "--json", str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # else `read` takes more than it gives, which `communicate` then misses
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    ) as process:
        assert process.stdout is not None
        seen = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 130
    assert transcript.read_bytes() == seen + rest
    figures = json.loads(result.read_text())
    assert (figures["stopped"], figures["complete"]) == ("interrupted", False)


def test_sampling_that_makes_no_sense_is_refused():
    for wrong in ({"top_k": -1}, {"min_p": 2}, {"repetition_penalty": 0}, {"repeat_last": -1}, {"seed": 2**64}):
        with pytest.raises(UsageError):
            Sampling(**wrong)


def test_the_coldest_temperature_is_greedy_and_overflows_nothing():
    logits = torch.tensor([[1e4, -1e4, 2e4, 0.0]])
    for temperature in (1e-300, 1e-5, 2e-4):
        sampler = Sampler(Sampling(temperature=temperature, seed=0), torch.device("cpu"))
        assert sampler(logits.clone(), torch.tensor([[3]])) == 2


def test_a_call_of_generate_itself_takes_the_same_cache(loaded):
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    with StreamCache.for_model(loaded.model, 32, chunk=16) as cache:
        out = loaded.model.generate(ids, max_new_tokens=200, do_sample=False, **{cache_argument(loaded.model): cache})
        assert out.shape[1] == ids.shape[1] + 200
        assert cache.max_slots <= 48
