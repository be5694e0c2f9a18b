"""What only some commands need may be missing: it is said at the start, with the command that installs it."""

import json
import subprocess
import sys

import pytest

OPTIONAL = ("matplotlib", "datasets", "pyarrow", "lm_eval")
TINY = ("--cache", 64, "--chunk", 32, "--kernel", "torch", "--quiet")


@pytest.fixture
def without(monkeypatch):
    """Hides a package from this process."""
    return lambda package: monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 40)
    return path


def test_a_picture_that_is_asked_for_is_refused_before_anything_runs(streamh2o, without, book, tmp_path):
    without("matplotlib")
    code, out, err = streamh2o("ppl", book, "--plot", tmp_path / "a.png", "--model", "no-such-model")
    assert (code, out) == (1, "")
    assert "needs matplotlib, which is not installed; install it with: pip install 'streamh2o[plot]'" in err
    code, out, err = streamh2o("plot", tmp_path / "no.jsonl")
    assert (code, out) == (1, "")
    assert "pip install 'streamh2o[plot]'" in err


def test_a_data_set_is_refused_before_anything_runs(streamh2o, without, book):
    without("datasets")
    code, out, err = streamh2o("ppl", book, "hf:pg19:test", "--model", "no-such-model")
    assert (code, out) == (1, "")
    assert "hf:pg19:test needs datasets, which is not installed" in err
    assert "pip install 'streamh2o[data]'" in err


def test_compare_says_which_files_are_left_out_and_writes_the_others(streamh2o, without, book, folder, tmp_path):
    without("matplotlib")
    without("pyarrow")
    line = (
        "compare",
        book,
        "--model",
        folder,
        "--policy",
        "h2o",
        "--chunk",
        32,
        "--cache",
        "64",
        "--out",
        tmp_path / "out",
    )
    code, _, err = streamh2o(*line, "--kernel", "torch")
    assert code == 0
    said = err.splitlines()
    assert any(s.startswith("matplotlib is not installed, so running.png and budget.png") for s in said)
    assert any("compare.parquet will not be written" in s and "'streamh2o[data]'" in s for s in said)
    assert {file.name for file in (tmp_path / "out").iterdir() if file.is_file()} >= {"compare.json"}
    assert not [*(tmp_path / "out").glob("*.png"), *(tmp_path / "out").glob("*.parquet")]


def test_needle_goes_without_its_heat_map(streamh2o, without, folder, book, tmp_path):
    without("matplotlib")
    line = "needle", book, "--model", folder, "--lengths", 300, "--depths", 50, "--policy", "streamingllm"
    code, _, err = streamh2o(*line, "--cache", 64, "--chunk", 32, "--kernel", "torch", "--out", tmp_path / "out")
    assert code == 0, err
    assert "matplotlib is not installed, so needle.png will not be written" in err
    assert (tmp_path / "out" / "needle.json").exists()


def test_a_run_needs_none_of_them(book, folder):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL})); "
        "from streamh2o.cli.main import run; run(sys.argv[1:])"
    )
    line = [sys.executable, "-c", code, "ppl", book, "--model", folder, *TINY, "--json", "-"]
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
