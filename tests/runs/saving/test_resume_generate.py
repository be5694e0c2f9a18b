"""`generate --checkpoint`: a text that was stopped or killed goes on with the same characters."""

import itertools
import json
import random
import re
import signal
import time

import pytest
import torch

from streamh2o.errors import UserError
from streamh2o.runs.generate.continuation import Continuation
from streamh2o.runs.generate.generator import Generator
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.stream.stream_cache import StreamCache
from tests.call import one_sentence
from tests.programs import ended, size, wait_for
from tests.tiny_folder import TEXT, make_book

SMALL = ("--cache", 48, "--chunk", 32, "--dtype", "float32", "--device", "cpu", "--threads", 1)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("text"))


def begun(loaded, policy: str) -> Continuation:
    cache = StreamCache.for_model(loaded.model, cache=48, policy=policy, chunk=32, evict_every=8)
    generator = Generator(loaded, cache, Sampling(seed=5, repeat_last=30))
    return Continuation(generator, loaded.tokenizer)


@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "streamingllm", "topk", "local"])
def test_from_every_token_the_same_tokens_follow(loaded, policy):
    ids = loaded.tokenizer(TEXT * 2, add_special_tokens=False).input_ids
    continuation, tokens, states = begun(loaded, policy), [], []
    with continuation.generator.cache:
        continuation.generator.read(ids)
        for token in continuation.generator.tokens(60):
            tokens.append(token)
            tensors, counts = continuation.state()
            states.append(({name: each.clone() for name, each in tensors.items()}, json.loads(json.dumps(counts))))
        whole, evictions = continuation.generator.cache.kv_bytes, continuation.generator.cache.evictions
        assert evictions > 4
    for number in (0, 1, 7, 8, 20, 33, 58):
        again = begun(loaded, policy)
        with again.generator.cache as cache:
            again.load_state(*states[number])
            assert list(again.generator.tokens(59 - number)) == tokens[number + 1 :]
            assert (cache.kv_bytes, cache.evictions) == (whole, evictions)


def test_a_damaged_state_is_one_sentence(loaded):
    from streamh2o.runs.saving.checks import naming_damage

    continuation = begun(loaded, "streamh2o")
    with continuation.generator.cache:
        continuation.generator.read(loaded.tokenizer(TEXT * 2, add_special_tokens=False).input_ids)
        tensors, counts = continuation.state()
    wrong = [({**tensors, name: tensor.flatten()[:3]}, counts) for name, tensor in tensors.items() if tensor.dim() > 1]
    wrong += [(tensors, {**counts, name: value}) for name, value in itertools.product(counts, [None, "x", -1, [[-1]]])]
    wrong += [
        ({**tensors, "newest": tensors["newest"] + 10**9}, counts),
        ({**tensors, "random": torch.ones(3)}, counts),
    ]
    said = []
    for saved in wrong:
        again = begun(loaded, "streamh2o")
        with again.generator.cache:
            try:
                with naming_damage("The checkpoint"):
                    again.load_state(*saved)
            except UserError as error:
                said.append(str(error))
    assert len(said) > len(wrong) / 2
    assert all("damaged" in sentence and "\n" not in sentence for sentence in said)


def writing(folder, input, transcript, json_file, *more):
    return (
        *("generate", input, "--model", folder, *SMALL, "--transcript", transcript, "--json", json_file, "--quiet"),
        *("--max-new-tokens", 300, *more),
    )


def lasting(result: str) -> dict:
    """The result without what only a clock knows."""
    return {name: value for name, value in json.loads(result).items() if not name.startswith(("seconds", "tokens_per"))}


@pytest.mark.parametrize("stop", [3, 40])
def test_a_stopped_text_goes_on_with_the_same_characters(streamh2o, folder, book, tmp_path, monkeypatch, stop):
    """Stopped while it reads (after 96 tokens of the prompt), and while it writes."""
    whole, broken, json_file = tmp_path / "whole.txt", tmp_path / "broken.txt", tmp_path / "a.json"
    text = book.read_bytes()
    assert streamh2o(*writing(folder, "-", whole, json_file, "--seed", 3), stdin=text)[0] == 0
    result = lasting(json_file.read_text())
    read, left = Generator.read, iter(range(stop))

    def read_and_stop(self, ids):
        read(self, ids)
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)

    saving = writing(folder, "-", broken, json_file, "--seed", 3, "--checkpoint", tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(Generator, "read", read_and_stop)
        assert streamh2o(*saving, stdin=text)[0] == 130
    if stop == 3:
        code, _, err = streamh2o(*saving, "--resume", stdin=b"X" + text[1:])
        assert code == 1
        assert "not those read before" in one_sentence(err)
    assert streamh2o(*saving, "--resume", stdin=text)[0] == 0
    assert broken.read_bytes() == whole.read_bytes()
    assert lasting(json_file.read_text()) == result
    json_file.unlink()
    code, out, _ = streamh2o(*saving, "--resume", stdin=b"")  # finished: nothing is read or written again
    assert (code, out) == (0, "")
    assert broken.read_bytes() == whole.read_bytes()
    assert lasting(json_file.read_text()) == result


def test_killed_at_random_moments_the_transcript_is_the_same(start, folder, book, tmp_path):
    whole, broken = tmp_path / "whole.txt", tmp_path / "broken.txt"
    more = ("--seed", 7, "--max-new-tokens", 1500)
    assert ended(start(tmp_path, *writing(folder, book, whole, tmp_path / "a.json", *more))) == 0
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 50, "--resume")
    line = writing(folder, book, broken, tmp_path / "b.json", *more, *saving)
    chance, kills = random.Random(0), 8
    for kill in range(kills):
        process = start(tmp_path, *line)
        if kill % 4 == 3:
            time.sleep(chance.uniform(0, 0.4))
        else:
            until = size(whole) * (kill + chance.random()) / (kills + 1)
            wait_for(lambda until=until: size(broken) >= until, process)
        process.kill()
        assert ended(process) == -signal.SIGKILL
    assert ended(start(tmp_path, *line)) == 0, (tmp_path / "stderr").read_text()
    assert broken.read_bytes() == whole.read_bytes()
    assert lasting((tmp_path / "b.json").read_text()) == lasting((tmp_path / "a.json").read_text())


def test_a_drawn_seed_is_that_of_the_checkpoint_and_other_options_are_refused(streamh2o, folder, book, tmp_path):
    json_file = tmp_path / "a.json"
    line = writing(folder, book, tmp_path / "a.txt", json_file, "--checkpoint", tmp_path / "saved")
    assert streamh2o(*line)[0] == 0
    seed = json.loads(json_file.read_text())["sampling"]["seed"]
    assert streamh2o(*line, "--resume")[0] == 0
    assert json.loads(json_file.read_text())["sampling"]["seed"] == seed
    for option, said in ((("--seed", 1), "--seed was not given"), (("--temperature", 1), "--temperature was 0.8")):
        code, _, err = streamh2o(*line, "--resume", *option)
        assert code == 2
        assert said in one_sentence(err)
    at = line.index("--transcript")
    assert "--transcript was given" in one_sentence(streamh2o(*line[:at], *line[at + 2 :], "--resume")[2])
    code, _, err = streamh2o(*line[:1], "--chat", "--checkpoint", tmp_path / "chat")
    assert code == 2
    assert re.search("--checkpoint saves a text", one_sentence(err))
