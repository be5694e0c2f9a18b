"""Faults, each caused for real: processes are killed, disks fill up, inputs change, memory runs out."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from streamh2o.errors import UserError
from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.runs.options import RunOptions
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.lm_head import LmHead
from streamh2o.text import open_inputs
from tests.call import one_sentence
from tests.perplexity import RunFailed, run_perplexity
from tests.programs import ended, size, wait_for
from tests.runs.saving.test_keeper import SMALL, SPEED, Outputs
from tests.tiny import llama
from tests.tiny_folder import TEXT, make_book, make_folder

PROGRAM = [sys.executable, "-m", "streamh2o"]
KILLS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def loaded(model):
    return load_model(model, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("text"))


# Killed


def test_a_run_killed_twenty_times_ends_with_the_same_losses_and_the_same_log(start, model, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("".join(f"{number}. {TEXT}" for number in range(1000)))
    unbroken, broken = Outputs(tmp_path / "unbroken"), Outputs(tmp_path / "broken")
    common = ("ppl", text, "--model", model, *SMALL, "--chunk", 64, "--max-tokens", 30_000, "--quiet")
    assert ended(start(tmp_path, *common, *unbroken.options)) == 0
    whole = size(unbroken.log)
    chance = random.Random(0)
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved", "--checkpoint-every", 500, "--resume")
    for kill in range(KILLS):
        process = start(tmp_path, *saving)
        if kill % 4 == 3:  # anywhere, also while it loads or takes the checkpoint up
            time.sleep(chance.uniform(0, 0.4))
        else:
            until = whole * (kill + chance.random()) / (KILLS + 1)
            wait_for(lambda until=until: size(broken.log) >= until, process)
            time.sleep(chance.uniform(0, 0.01))
        process.kill()
        assert ended(process) == -signal.SIGKILL
    assert ended(start(tmp_path, *saving)) == 0, (tmp_path / "stderr").read_text()
    assert broken.contents() == unbroken.contents()
    assert len(broken.contents()[0]) == -(-30_000 // 64)


@pytest.mark.parametrize("command", ["compare", "needle"])
def test_of_a_killed_evaluation_the_finished_cells_stay_and_the_rest_is_run(start, model, tmp_path, command):
    text = tmp_path / "book.txt"
    text.write_text("".join(f"{number}. {TEXT}" for number in range(60)))
    common = (command, text, "--model", model, "--chunk", 128, "--dtype", "float32", "--threads", 1, "--quiet")
    common += {
        "compare": ("--cache", "64,128", "--policy", "h2o,streamingllm,streamh2o"),
        "needle": ("--cache", 460, "--policy", "answer", "--lengths", "200,300,400,500", "--depths", "20,80"),
    }[command]
    assert ended(start(tmp_path, *common, "--out", tmp_path / "whole")) == 0, (tmp_path / "stderr").read_text()

    def cells(folder: str) -> dict[str, Path]:
        found = (tmp_path / folder).rglob("*.json")
        return {path.name: path for path in found if path.name != f"{command}.json"}

    def when() -> dict[str, int]:
        return {name: path.stat().st_mtime_ns for name, path in cells("broken").items()}

    before: dict[str, int] = {}
    for kill in range(3):
        process, had = start(tmp_path, *common, "--out", tmp_path / "broken"), len(before)
        wait_for(lambda had=had: len(cells("broken")) > had, process)
        time.sleep(0.02 * kill)
        process.kill()
        ended(process)
        assert before.items() <= when().items()
        before = when()
    assert ended(start(tmp_path, *common, "--out", tmp_path / "broken")) == 0, (tmp_path / "stderr").read_text()
    assert before.items() <= when().items()
    whole, broken = ({n: lasting(path) for n, path in cells(folder).items()} for folder in ("whole", "broken"))
    assert broken == whole


def lasting(path: Path) -> dict:
    """A cell without what a clock and the machine say."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name not in SPEED}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_before_the_end(start, model, book, tmp_path, number):
    outputs = Outputs(tmp_path / "out")
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", "1h")
    line = ("ppl", book, "--model", model, *SMALL, "--chunk", 1, *saving, *outputs.options)
    process = start(tmp_path, *line)
    wait_for(lambda: size(outputs.log) > 0, process)
    os.kill(process.pid, number)
    assert ended(process) == 130
    tokens = json.loads(outputs.json.read_text())["tokens"]
    assert f"holds a checkpoint after {tokens} tokens" in (tmp_path / "stderr").read_text()
    (saved,) = (tmp_path / "saved").glob("*.json")
    assert json.loads(saved.read_text())["body"]["tokens"] == tokens


def test_two_runs_on_one_folder_are_refused_until_the_first_is_gone(start, model, book, tmp_path, streamh2o):
    log = tmp_path / "a.jsonl"
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", "1h")
    line = ("ppl", book, "--model", model, *SMALL, *saving, "--quiet")
    process = start(tmp_path, *line, "--log", log, "--chunk", 1)
    wait_for(lambda: size(log) > 0, process)
    os.kill(process.pid, signal.SIGSTOP)
    code, _, err = streamh2o(*line)
    assert code == 1
    assert "another run is using this folder" in one_sentence(err)
    process.kill()
    assert ended(process) == -signal.SIGKILL
    assert streamh2o(*line)[0] == 0


def test_nobody_reading_stdout_loses_no_file(model, book, tmp_path):
    outputs = Outputs(tmp_path / "out")
    line = ["ppl", book, "--model", model, *SMALL, *outputs.options, "--checkpoint", tmp_path / "saved", "--quiet"]
    process = subprocess.Popen([*PROGRAM, *map(str, line)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 1
    assert json.loads(outputs.json.read_text())["complete"]
    (saved,) = (tmp_path / "saved").glob("*.json")
    assert json.loads(saved.read_text())["body"]["finished"]


# No room


def test_a_full_disk_while_saving_leaves_the_older_checkpoint_to_go_on_from(start, model, book, tmp_path):
    unbroken, broken = Outputs(tmp_path / "unbroken"), Outputs(tmp_path / "broken")
    common = ("ppl", book, "--model", model, *SMALL, "--quiet")
    assert ended(start(tmp_path, *common, *unbroken.options)) == 0
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved", "--checkpoint-every", 32)
    # So many bytes hold the tensors of 32 tokens, and not those of 64.
    assert ended(start(tmp_path, *saving, file_size=15_000)) == 1
    assert re.fullmatch(
        r"streamh2o: error: \S+checkpoint-\d\.json: can't be written \(.*file too large.*\); free some space.*\n",
        (tmp_path / "stderr").read_text(),
    )
    assert not list((tmp_path / "saved").glob(".*"))
    assert ended(start(tmp_path, *saving, "--resume")) == 0, (tmp_path / "stderr").read_text()
    assert broken.contents() == unbroken.contents()


def test_a_full_disk_while_logging_leaves_the_last_checkpoint_to_go_on_from(start, model, book, tmp_path):
    unbroken, broken = Outputs(tmp_path / "unbroken"), Outputs(tmp_path / "broken")
    common = ("ppl", book, "--model", model, *SMALL, "--chunk", 1, "--quiet")
    assert ended(start(tmp_path, *common, *unbroken.options)) == 0
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved", "--checkpoint-every", 16)
    assert ended(start(tmp_path, *saving, file_size=40_000)) == 1
    assert re.fullmatch(
        r"streamh2o: error: \S+a\.jsonl: can't be written \(file too large\); free some space.*\n",
        (tmp_path / "stderr").read_text(),
    )
    assert size(broken.log) == 40_000  # cut off in mid-line
    assert ended(start(tmp_path, *saving, "--resume")) == 0, (tmp_path / "stderr").read_text()
    assert broken.contents() == unbroken.contents()


def test_a_cache_without_room_in_memory_is_refused_with_the_sum_and_what_would_fit():
    model = llama(positions=2**50)
    with pytest.raises(UserError) as caught:
        ChunkStream(model, make_policy("h2o", cache=2**40), chunk=256)
    sentence = str(caught.value)
    slots = 2**40 + 256
    assert f"2 layers x 2 heads x {slots} slots x 76 bytes" in sentence
    assert f"{2 * 2 * slots * 76 / 1e9:,.1f} GB" in sentence
    fits = int(re.search(r"--cache (\d+) would fit", sentence)[1])
    from streamh2o.machine import available_bytes

    assert fits * 2 * 2 * 76 == pytest.approx(available_bytes(), rel=0.3)


def test_memory_that_the_user_limits_counts_as_all_there_is(tmp_path):
    code = (
        "import resource; from pathlib import Path\n"
        "from streamh2o.machine import available_bytes\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + 50_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "print(available_bytes())"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 40_000_000 < int(out) <= 50_000_000


def short_of_memory(model, limit: int):
    """From the sixth pass on the second layer finds no memory for more than `limit` tokens."""
    passes = iter(range(5))

    def take_too_much(module, arguments):
        if next(passes, None) is None and arguments[0].shape[1] > limit:
            torch.empty(2**46)

    return model.model.layers[1].register_forward_pre_hook(take_too_much)


def test_no_memory_even_for_one_token_ends_with_what_was_finished(loaded, book):
    hook = short_of_memory(loaded.model, 0)
    try:
        with pytest.raises(RunFailed, match="out of memory after 160 tokens; free some") as caught:
            run_perplexity(loaded, open_inputs([book])[0], make_policy("h2o", cache=64), RunOptions(chunk=32))
    finally:
        hook.remove()
    assert (caught.value.result["tokens"], caught.value.result["complete"]) == (160, False)


def test_no_memory_for_the_losses_ends_with_what_was_finished(loaded, book, monkeypatch):
    losses, calls = LmHead.losses, iter(range(3))

    def short(self, hidden, targets):
        if next(calls, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(self, hidden, targets)

    monkeypatch.setattr(LmHead, "losses", short)
    with pytest.raises(RunFailed, match="out of memory after 96 tokens; free some") as caught:
        run_perplexity(loaded, open_inputs([book])[0], make_policy("h2o", cache=64), RunOptions(chunk=32))
    assert (caught.value.result["tokens"], caught.value.result["scored"]) == (96, 95)


def test_a_stream_that_lost_a_chunk_is_not_fed_on(loaded):
    ids = torch.tensor([loaded.tokenizer(TEXT * 8, add_special_tokens=False).input_ids[:224]])
    hook = short_of_memory(loaded.model, 0)
    with ChunkStream(loaded.model, make_policy("h2o", cache=64), chunk=32) as stream:
        try:
            for part in ids[:, :160].split(32, dim=1):
                stream.feed(part)
            tensors, counts = stream.state()
            saved = {name: tensor.clone() for name, tensor in tensors.items()}
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                stream.feed(ids[:, 160:192])
        finally:
            hook.remove()
        with pytest.raises(UserError, match="cut off"):
            stream.feed(ids[:, 160:192])
        stream.load_state(saved, counts)
        found = stream.feed(ids[:, 160:192]).losses
    with ChunkStream(loaded.model, make_policy("h2o", cache=64), chunk=32) as stream:
        whole = [stream.feed(part).losses for part in ids[:, :192].split(32, dim=1)]
    assert torch.equal(found, whole[-1])


# Inputs that change under the reader


def change_once(streamh2o, model, monkeypatch, path, change, *options):
    """Run `path` with `change(path)` after the first bytes were read."""
    from streamh2o.text import reader

    read, changes = reader.read_block, iter([change])

    def read_and_change(source, stream, count):
        data = read(source, stream, count)
        next(changes, lambda path: None)(path)
        return data

    monkeypatch.setattr(reader, "read_block", read_and_change)
    monkeypatch.setattr(reader, "READ_BYTES", 4096)
    return streamh2o("ppl", path, "--model", model, *SMALL, "--json", "-", *options)


@pytest.fixture
def short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(TEXT * 50)
    return path


def test_an_input_cut_short_while_it_is_read_is_an_error(streamh2o, model, short, monkeypatch):
    code, out, err = change_once(streamh2o, model, monkeypatch, short, lambda path: os.truncate(path, 4500), "--quiet")
    assert code == 1
    assert "short.txt: ended after 4500 bytes, and had 5000 when the run began" in one_sentence(err)
    assert not json.loads(out)["complete"]


def test_an_input_that_grows_while_it_is_read_is_read_to_its_end_and_it_is_said(streamh2o, model, short, monkeypatch):
    def grow(path):
        with path.open("a") as file:
            file.write(TEXT)

    code, out, err = change_once(streamh2o, model, monkeypatch, short, grow)
    assert code == 0
    assert json.loads(out)["input"]["bytes"] == 5100
    assert "short.txt: grew from 5000 bytes to 5100 while it was read" in err


def test_an_input_that_vanishes_while_it_is_read_is_read_to_its_end(streamh2o, model, short, monkeypatch):
    whole = json.loads(streamh2o("ppl", short, "--model", model, *SMALL, "--json", "-")[1])
    code, out, _ = change_once(streamh2o, model, monkeypatch, short, lambda path: path.unlink())
    assert code == 0
    assert json.loads(out)["nll_sum"] == whole["nll_sum"]
    assert not short.exists()


def test_an_input_that_vanishes_before_its_turn_leaves_the_results_before_it(
    streamh2o, model, book, tmp_path, monkeypatch
):
    later = tmp_path / "later.txt"
    later.write_text(TEXT)
    sources = open_inputs([book, later])
    later.unlink()
    monkeypatch.setattr("streamh2o.text.sources.open_inputs", lambda *_: sources)
    code, out, err = streamh2o("ppl", book, later, "--model", model, *SMALL, "--json", "-", "--quiet")
    assert code == 1
    assert "later.txt: can't be read" in one_sentence(err)
    assert json.loads(out)["input"]["name"] == str(book)


def test_a_pipe_closed_inside_a_character_is_an_error_that_says_where(streamh2o, model):
    code, _, err = streamh2o("ppl", "-", "--model", model, *SMALL, "--quiet", stdin=(TEXT + "caf").encode() + b"\xc3")
    assert code == 1
    assert f"ends inside a UTF-8 character that begins at byte {len(TEXT) + 3}" in one_sentence(err)
