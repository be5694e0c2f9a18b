import json
import os
import random
import signal

import numpy as np
import pytest

from streamh2o.errors import UsageError, UserError
from streamh2o.policies import make_policy
from streamh2o.runs.growing_file import LogWriter
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.saving.keeper import Keeper, Pace
from tests.call import one_sentence
from tests.perplexity import run_perplexity
from tests.tiny_folder import TEXT, make_book, make_folder

SMALL = ("--cache", "64", "--chunk", "32", "--dtype", "float32", "--device", "cpu", "--threads", "1")
SPEED = {"seconds", "tokens_per_second", "peak_rss_bytes", "rss_bytes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("model"), bos=True))


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return make_book(tmp_path_factory.mktemp("text"))


@pytest.fixture
def stop_after(monkeypatch):
    """Sends this process a signal when so many chunks have been logged."""
    write = LogWriter.__call__

    def arrange(chunks: int, number: int = signal.SIGINT) -> None:
        left = iter(range(chunks - 1, -1, -1))

        def log(writer, progress):
            write(writer, progress)
            if next(left, None) == 0:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(LogWriter, "__call__", log)

    return arrange


def without_speed(text: str) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k not in SPEED} for line in text.splitlines()]


class Outputs:
    """The files of one run, and what they hold."""

    def __init__(self, folder):
        folder.mkdir()
        self.log, self.losses, self.json = (folder / name for name in ("a.jsonl", "a.npy", "a.json"))
        self.options = ("--log", self.log, "--nll-out", self.losses, "--json", self.json)

    def contents(self):
        return without_speed(self.log.read_text()), self.losses.read_bytes(), without_speed(self.json.read_text())


@pytest.fixture
def unbroken(tmp_path):
    return Outputs(tmp_path / "unbroken")


@pytest.fixture
def broken(tmp_path):
    return Outputs(tmp_path / "broken")


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        (1, ()),
        (8, ("--newline", "lf", "--far", "16")),
        (10_000, ()),  # never: its checkpoint is that of the end
        (4, ("--policy", "h2o", "--per-head", "query")),
        (6, ("--policy", "h2o", "--evict", "token")),
        (6, ("--policy", "h2o", "--kv-bits", "4")),
        (5, ("--policy", "recompute", "--cache", "40")),
        (3, ("--policy", "full", "--max-tokens", "300")),
    ],
)
def test_a_stopped_run_goes_on_with_the_same_digits(
    streamh2o, stop_after, model, book, tmp_path, unbroken, broken, chunks, options
):
    common = ("ppl", book, "--model", model, *SMALL, *options)
    assert streamh2o(*common, *unbroken.options)[0] == 0
    stop_after(chunks, signal.SIGTERM)
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved")
    code, out, err = streamh2o(*saving)
    if chunks < 10_000:
        assert code == 130
        assert "(incomplete)" in out
        assert "--resume goes on from it" in err
        assert not json.loads(broken.json.read_text())["complete"]
    code, _, _ = streamh2o(*saving, "--resume")
    assert code == 0
    assert broken.contents() == unbroken.contents()


def test_every_checkpoint_of_a_run_leads_to_the_same_end(model, book):
    from streamh2o.models.load import load_model
    from streamh2o.text import open_inputs

    loaded = load_model(model, dtype="float32", device="cpu")
    how = (loaded, open_inputs([book])[0], make_policy("streamh2o", cache=48), RunOptions(chunk=40))
    states: list = []

    def keep(run, stopping):
        tensors, counts = run.state()
        states.append(({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(counts))))

    whole = run_perplexity(*how, keep=keep)
    assert len(states) >= 6
    for saved in states:
        with PerplexityRun(*how, saved=saved) as run:
            assert run.result()["input"]["sha256"] == saved[1]["reader"]["sha256"]
            for _ in run.chunks():
                pass
            assert without_speed(json.dumps(run.result())) == without_speed(json.dumps(whole))


def test_of_several_inputs_the_finished_ones_are_not_run_again(
    streamh2o, stop_after, model, book, tmp_path, unbroken, broken
):
    inputs = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for number, path in enumerate(inputs):
        path.write_text(f"{number} {book.read_text()}")
    common = ("ppl", *inputs, "--model", model, *SMALL, "--max-tokens", 150)
    assert streamh2o(*common, *unbroken.options)[0] == 0
    stop_after(7)
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved", "--plot", tmp_path / "a.svg")
    assert streamh2o(*saving)[0] == 130
    inputs[0].write_bytes(b"\xff" * inputs[0].stat().st_size)  # reading it again would fail
    assert streamh2o(*saving, "--resume")[0] == 0
    assert broken.contents() == unbroken.contents()
    assert all(f"{path.name}: " in (tmp_path / "a.svg").read_text() for path in inputs)


def test_stdin_is_piped_in_again_and_checked(streamh2o, stop_after, model, book, tmp_path, unbroken, broken):
    text = book.read_bytes()
    common = ("ppl", "-", "--model", model, *SMALL)
    assert streamh2o(*common, *unbroken.options, stdin=text)[0] == 0
    stop_after(6)
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved")
    assert streamh2o(*saving, stdin=text)[0] == 130
    saved = broken.log.read_bytes()
    code, _, err = streamh2o(*saving, "--resume", "--quiet", stdin=b"A" + text[1:])
    assert code == 1
    assert "not those read before" in one_sentence(err)
    assert broken.log.read_bytes() == saved
    code, _, err = streamh2o(*saving, "--resume", "--quiet", stdin=text[:50])
    assert code == 1
    assert "ends after 50 bytes" in one_sentence(err)
    assert streamh2o(*saving, "--resume", stdin=text)[0] == 0
    assert broken.contents() == unbroken.contents()


@pytest.fixture
def stopped(streamh2o, stop_after, model, book, tmp_path, broken):
    """A run that was stopped: its command line, to be resumed."""
    path = tmp_path / "copy.txt"
    path.write_bytes(book.read_bytes())
    line = ("ppl", path, "--model", model, *SMALL, *broken.options, "--checkpoint", tmp_path / "saved", "--quiet")
    stop_after(5)
    assert streamh2o(*line)[0] == 130
    return line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--chunk", 16, "--chunk was 32 at the checkpoint and is 16 now"),
        ("--cache", 65, "--cache was 64"),
        ("--policy", "h2o", "--policy"),
        ("--sinks", 3, "--sinks was 4"),
        ("--max-tokens", 1000, "--max-tokens was not given"),
        ("--newline", "lf", "--newline was keep"),
        ("--errors", "replace", "--errors was strict"),
        ("--bos", "no", "--bos was auto"),
        ("--dtype", "bfloat16", "--dtype was float32"),
        ("--threads", 2, "--threads was 1"),
        ("--plot", "a.png", "--plot was not given"),
    ],
)
def test_another_option_is_refused_by_name(streamh2o, stopped, option, value, said):
    code, _, err = streamh2o(*stopped, "--resume", option, value)
    assert code == 2
    assert said in one_sentence(err)


def test_an_output_that_is_left_out_is_refused(streamh2o, stopped, broken):
    at = stopped.index("--log")
    code, _, err = streamh2o(*stopped[:at], *stopped[at + 2 :], "--resume")
    assert code == 2
    assert "--log was given" in one_sentence(err)


def test_another_model_is_refused(streamh2o, stopped, tmp_path):
    make_folder(tmp_path / "other", bos=True)
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text() + "\n")
    code, _, err = streamh2o(*stopped, "--resume", "--model", tmp_path / "other")
    assert code == 1
    assert "fingerprint" in one_sentence(err)


def test_another_input_is_refused(streamh2o, stopped, book):
    path = stopped[1]
    assert "other inputs" in one_sentence(streamh2o("ppl", book, *stopped[2:], "--resume")[2])
    text = path.read_bytes()
    path.write_bytes(text + b"more")
    assert f"copy.txt: has {len(text) + 4} bytes, and had {len(text)}" in one_sentence(
        streamh2o(*stopped, "--resume")[2]
    )
    path.write_bytes(b"X" + text[1:])
    code, _, err = streamh2o(*stopped, "--resume")
    assert code == 1
    assert "copy.txt: its first" in one_sentence(err)
    path.unlink()
    assert "no such file" in one_sentence(streamh2o(*stopped, "--resume")[2])
    path.write_bytes(text)
    assert streamh2o(*stopped, "--resume")[0] == 0


def test_a_log_that_is_not_that_of_the_checkpoint_is_refused_and_left_alone(streamh2o, stopped, broken):
    whole = broken.log.read_bytes()
    for wrong, said in ((whole[:-20], "bytes, and had"), (b"x" * len(whole), "not the file of the checkpoint")):
        broken.log.write_bytes(wrong)
        code, _, err = streamh2o(*stopped, "--resume")
        assert code == 1
        assert said in one_sentence(err)
        assert broken.log.read_bytes() == wrong
    broken.log.unlink()
    assert "can't be written (no such file" in one_sentence(streamh2o(*stopped, "--resume")[2])


def test_a_folder_with_a_checkpoint_is_not_overwritten_without_resume(streamh2o, stopped, broken):
    before = broken.log.read_bytes()
    code, _, err = streamh2o(*stopped)
    assert code == 2
    assert "--resume, or name another folder" in one_sentence(err)
    assert broken.log.read_bytes() == before


def test_resume_needs_a_folder_and_starts_anew_in_an_empty_one(streamh2o, model, book, tmp_path):
    code, _, err = streamh2o("ppl", book, "--model", model, *SMALL, "--resume")
    assert code == 2
    assert "--checkpoint" in one_sentence(err)
    code, _, err = streamh2o("ppl", book, "--model", model, *SMALL, "--resume", "--checkpoint", tmp_path / "new")
    assert code == 0
    assert "no checkpoint yet, so this starts from the beginning" in err


def test_a_finished_run_prints_its_result_again_without_the_model(streamh2o, model, book, tmp_path, monkeypatch):
    line = ("ppl", book, "--model", model, *SMALL, "--checkpoint", tmp_path / "saved", "--json", "-")
    first = streamh2o(*line)
    assert first[0] == 0
    monkeypatch.setattr("streamh2o.models.load.load_model", None)
    code, out, err = streamh2o(*line, "--resume")
    assert (code, out) == (0, first[1])
    assert "had come to its end" in err


def test_of_a_damaged_checkpoint_the_older_one_is_taken_with_the_same_end(
    streamh2o, model, book, tmp_path, unbroken, broken, stop_after
):
    common = ("ppl", book, "--model", model, *SMALL)
    streamh2o(*common, *unbroken.options)
    saving = (*common, *broken.options, "--checkpoint", tmp_path / "saved", "--checkpoint-every", "64")
    stop_after(7)
    assert streamh2o(*saving)[0] == 130
    newest = max((tmp_path / "saved").glob("*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
    newest.write_bytes(newest.read_bytes()[:100])
    code, _, err = streamh2o(*saving, "--resume")
    assert code == 0
    assert f"{newest.stem} is damaged" in err
    assert broken.contents() == unbroken.contents()


def test_a_loss_that_is_no_number_leaves_the_last_good_checkpoint(streamh2o, tmp_path):
    broken_model = make_folder(tmp_path / "model", broken_token="z")
    (tmp_path / "text").write_text("".join(f"{number} {TEXT.replace('z', '')}" for number in range(3)) + "zz")
    line = ("ppl", tmp_path / "text", "--model", broken_model, *SMALL, "--checkpoint", tmp_path / "saved")
    for extra in (("--checkpoint-every", 32), ("--checkpoint-every", 32, "--resume")):
        code, out, err = streamh2o(*line, *extra)
        assert code == 1
        assert "(incomplete)" in out
        *_, note, error = err.splitlines()
        assert "holds a checkpoint after" in note
        assert "is not a finite number" in error


def test_what_auto_chose_stays_chosen(streamh2o, stop_after, model, book, tmp_path):
    line = ("ppl", book, "--model", model, "--cache", 64, "--chunk", 32, "--checkpoint", tmp_path / "saved")
    stop_after(3)
    log = ("--log", tmp_path / "a.jsonl", "--device", "cpu")
    assert streamh2o(*line, *log, "--dtype", "bfloat16", "--threads", 1)[0] == 130
    code, out, _ = streamh2o(*line, *log, "--json", "-", "--resume")
    assert code == 0
    assert (json.loads(out)["dtype"], json.loads(out)["threads"]) == ("bfloat16", 1)


def test_libraries_of_another_version_are_told_and_another_streamh2o_is_refused(streamh2o, stopped, monkeypatch):
    loud = [part for part in stopped if part != "--quiet"]
    from streamh2o import versions

    now = versions.versions()
    monkeypatch.setattr("streamh2o.versions.versions", lambda: {**now, "torch": "99.0", "streamh2o": "99.0"})
    code, _, err = streamh2o(*stopped, "--resume")
    assert code == 1
    assert "made by streamh2o" in one_sentence(err)
    monkeypatch.setattr("streamh2o.versions.versions", lambda: {**now, "torch": "99.0"})
    code, _, err = streamh2o(*loud, "--resume")
    assert code == 0
    assert "torch was" in err
    assert "is 99.0 now" in err


@pytest.mark.parametrize(
    ("text", "pace"),
    [
        ("60s", Pace(60.0)),
        ("1.5m", Pace(90.0)),
        ("2h", Pace(7200.0)),
        ("5000", Pace(None, 5000)),
    ],
)
def test_the_pace_is_a_time_or_a_number_of_tokens(text, pace):
    assert Pace.parse(text) == pace


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "soon", "1d", "1e3", "9" * 30])
def test_any_other_pace_is_refused(text):
    with pytest.raises(UsageError, match="60s or 5m, or a number"):
        Pace.parse(text)


def test_the_pace_is_kept_by_a_clock_that_the_user_cannot_set_back(tmp_path, model, book, monkeypatch):
    from streamh2o.models.load import load_model
    from streamh2o.text import open_inputs

    backwards = iter(range(10**9, 0, -1000))
    monkeypatch.setattr("time.time", lambda: float(next(backwards)))
    ticks = iter(range(0, 10**6, 20))  # twenty seconds from one look at the clock to the next
    loaded = load_model(model, dtype="float32", device="cpu")
    saved_at = []
    with Keeper(tmp_path / "saved", "60s", False, lambda said: None, lambda: float(next(ticks))) as keeper:
        keeper.check(
            {"inputs": [], "model": ["", ""], "options": {}, "versions": {}}, dict.fromkeys(("--log", "--plot"))
        )
        save = keeper._folder.save
        monkeypatch.setattr(keeper._folder, "save", lambda body, tensors: (save(body, tensors), saved_at.append(1)))
        result = run_perplexity(
            loaded, open_inputs([book])[0], make_policy("streamh2o", cache=64), RunOptions(chunk=32), keep=keeper.keep
        )
    assert result["complete"]
    assert result["seconds"] > 0
    chunks = -(-result["tokens"] // 32)
    assert chunks // 4 - 1 <= len(saved_at) <= chunks // 3 + 1


def test_a_damaged_state_is_one_sentence_whatever_is_in_it(tmp_path, model, book):
    """Where the digests fit, because whoever wrote the file made them fit."""
    from streamh2o.models.load import load_model
    from streamh2o.text import open_inputs

    loaded = load_model(model, dtype="float32", device="cpu")
    how = (loaded, open_inputs([book])[0], make_policy("streamh2o", cache=48), RunOptions(chunk=40, max_tokens=120))
    states: list = []
    run_perplexity(*how, keep=lambda run, stopping: states.append(run.state()))
    tensors, counts = states[1]
    chance = random.Random(0)
    refused = []
    for _ in range(120):
        damaged = json.loads(json.dumps(counts))
        part = damaged if chance.random() < 0.2 else damaged[chance.choice(["stream", "perplexity", "reader"])]
        part[chance.choice(list(part))] = chance.choice([None, "x", [], {}, -5, 10**9, 1.5])
        fewer = dict(tensors)
        if chance.random() < 0.3:
            name = chance.choice(list(fewer))
            fewer[name] = fewer[name].flatten()[:3]
        try:
            with PerplexityRun(*how, saved=(fewer, damaged)) as run:
                for _ in run.chunks():
                    pass
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert not [sentence for sentence in refused if "\n" in sentence]


def test_the_array_can_be_loaded_at_every_checkpoint(stopped, broken):
    assert len(np.load(broken.losses)) == 5 * 32 - 1
