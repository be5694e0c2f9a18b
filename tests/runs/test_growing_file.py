import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.generate.transcript import Transcript
from streamh2o.runs.growing_file import LOG_FIELDS, LogWriter, LossWriter
from streamh2o.runs.progress import Progress


def progress(losses=(1.0, 2.0), **changes) -> Progress:
    values = {
        "name": "book.txt",
        "token": 300,
        "byte": 1200,
        "nll": float(sum(losses)),
        "n": len(losses),
        "losses": np.array(losses, np.float32),
        "ppl": 24.5,
        "ppl_window": 23.25,
        "window": 1000,
        "tokens_per_second": 100.0,
        "seconds": 3.0,
        "fraction": 0.25,
        "rss_bytes": 1_500_000_000,
        "slots": 512,
        "budget": 512,
        "composition": {"sinks": 4, "hitters": 128, "recent": 380},
    }
    return Progress(**(values | changes))


def test_a_log_line_holds_the_promised_fields_and_is_on_disk_at_once(tmp_path):
    with LogWriter(tmp_path / "log.jsonl") as log:
        log(progress())
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert len(lines) == 1
        assert tuple(json.loads(lines[0])) == LOG_FIELDS
        assert json.loads(lines[0])["nll"] == 3.0


def test_a_log_of_several_inputs_names_them(tmp_path):
    with LogWriter(tmp_path / "log.jsonl", several=True) as log:
        log(progress(name="a"))
    assert json.loads((tmp_path / "log.jsonl").read_text())["input"] == "a"


def test_a_first_chunk_without_a_loss_is_logged_as_null(tmp_path):
    with LogWriter(tmp_path / "log.jsonl") as log:
        log(progress(losses=(), ppl=None, ppl_window=None))
    assert json.loads((tmp_path / "log.jsonl").read_text())["ppl"] is None


def test_losses_can_be_loaded_after_every_chunk(tmp_path):
    path, expected = tmp_path / "losses.npy", []
    with LossWriter(path) as losses:
        assert np.load(path).shape == (0,)
        for part in ([1.0], [], [2.5, 3.5], list(range(1000))):
            losses(progress(part))
            expected += part
            loaded = np.load(path)
            assert loaded.dtype == np.float32
            assert loaded.tolist() == expected


@pytest.mark.parametrize("kind", [LogWriter, LossWriter, Transcript])
def test_a_growing_file_replaces_a_link_instead_of_following_it(tmp_path, kind):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "mine").symlink_to(tmp_path / "theirs")
    kind(tmp_path / "mine").close()
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "mine").is_symlink()


def test_a_link_below_dev_is_what_the_system_makes_of_it(tmp_path):
    code = "from pathlib import Path; from streamh2o.runs.generate.transcript import Transcript\n"
    code += "Transcript(Path('/dev/stdout')).write('here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("here", "")


def test_a_full_disk_is_one_sentence():
    with pytest.raises(UserError, match=r"/dev/full: can't be written \(no space left on device\)"):
        LogWriter(Path("/dev/full"))(progress())


def test_a_limit_on_file_size_keeps_the_lines_before_it(tmp_path):
    path = tmp_path / "log.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with LogWriter(path) as log:
            log(progress())
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
            with pytest.raises(UserError, match="can't be written"):
                log(progress())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert json.loads(path.read_text().splitlines()[0])["token"] == 300


def test_losses_need_a_plain_file():
    with pytest.raises(UsageError, match="--nll-out /dev/null"):
        LossWriter(Path("/dev/null"))
