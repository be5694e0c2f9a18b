"""Cells of a comparison: the same as runs alone, each run once, whatever stops them in between."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from streamh2o.cli.main import run as command
from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.report.comparison import rows
from streamh2o.runs.compare import check_columns, key_of, make_columns, plan, run_cells
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions, open_reader
from streamh2o.runs.progress import Display
from streamh2o.text import Source, TokenReader
from streamh2o.text.replay import ReadText, Replay
from tests.perplexity import run_perplexity
from tests.tiny import dense_losses
from tests.tiny_folder import TEXT, make_folder

OPTIONS = RunOptions(chunk=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(str(folder), dtype="float32", device="cpu")


def source(text: str, name: str = "book.txt") -> Source:
    data = text.encode()
    return Source(name, len(data), lambda: io.BytesIO(data))


def read(loaded, text: str, name: str = "book.txt") -> ReadText:
    with open_reader(source(text, name), loaded.tokenizer, OPTIONS) as reader:
        return ReadText.of(reader, OPTIONS.chunk)


@pytest.fixture(scope="module")
def texts(loaded):
    return [read(loaded, TEXT * 3, "one.txt"), read(loaded, TEXT[40:] * 3, "two.txt")]


class Titles(Display):
    """Notes the cells that begin."""

    def __init__(self, titles):
        self.titles = titles

    def begin(self, name, number=1, of=1):
        self.titles.append(name)


@pytest.fixture(scope="module")
def wanted(loaded, texts):
    return plan(loaded, texts, make_columns(["streamh2o", "h2o", "streamingllm"], [16, 32]), against_full=True)


@pytest.fixture(scope="module")
def cells(loaded, wanted, tmp_path_factory):
    return list(run_cells(loaded, wanted, tmp_path_factory.mktemp("cells"), OPTIONS))


def test_a_cell_has_the_numbers_of_a_run_alone(loaded, cells):
    for cell in cells:
        alone = run_perplexity(loaded, cell.text.source, cell.column.policy, OPTIONS)
        for name in ("nll_sum", "scored", "tokens", "bits_per_byte", "ppl_word", "evictions", "kv_bytes", "input"):
            assert cell.result[name] == alone[name], name
        assert math.isclose(float(cell.losses.sum(dtype=np.float64)), alone["nll_sum"], rel_tol=1e-6)


def test_a_replay_gives_what_its_reader_gave(loaded, texts):
    with TokenReader(texts[0].source, loaded.tokenizer) as reader:
        replay = Replay(texts[0])
        while (block := reader.read(16)) is not None:
            again = replay.read(16)
            assert np.array_equal(again.ids, block.ids)
            for name in ("tokens", "bytes_read", "words_read", "sha256", "complete", "bos_added"):
                assert getattr(replay, name) == getattr(reader, name), name
        assert replay.read(16) is None


def test_an_input_is_opened_and_tokenised_once(loaded, tmp_path):
    opened = []
    one = source(TEXT * 2)
    counting = Source(one.name, one.size, lambda: opened.append(1) or one.open())
    with open_reader(counting, loaded.tokenizer, OPTIONS) as reader:
        text = ReadText.of(reader, OPTIONS.chunk)
    list(run_cells(loaded, plan(loaded, [text], make_columns(["h2o", "local"], [16, 32])), tmp_path, OPTIONS))
    assert len(opened) == 1


def test_interrupted_and_started_again_no_cell_runs_twice_and_the_table_is_the_same(loaded, wanted, cells, tmp_path):
    started: list[str] = []
    interrupt = Interrupt()

    class StopInTheMiddleOfTheFifth(Titles):
        def __call__(self, progress):
            interrupt.requested = len(started) == 5 and progress.token > 32

    first = list(
        run_cells(
            loaded,
            wanted,
            tmp_path,
            OPTIONS,
            interrupt=interrupt,
            display=StopInTheMiddleOfTheFifth(started),
        )
    )
    assert len(first) == 4
    assert len(started) == 5
    again: list[str] = []
    second = list(run_cells(loaded, wanted, tmp_path, OPTIONS, display=Titles(again)))
    assert again == [started[4], *again[1:]]
    assert len(again) == len(wanted) - 4
    assert not set(again) & set(started[:4])

    def without_times(found):
        return [{k: v for k, v in row.items() if "seconds" not in k and "second" not in k} for row in rows(found)]

    assert without_times(second) == without_times(cells)
    assert [row["tokens_per_second"] for row in rows(second)[:4]] == [row["tokens_per_second"] for row in rows(first)]


def test_everything_a_loss_depends_on_is_in_the_key(loaded, texts):
    column = make_columns(["h2o"], [32])[0]
    keys = {
        key_of(loaded, texts[0], column, OPTIONS),
        key_of(loaded, texts[1], column, OPTIONS),
        key_of(loaded, texts[0], make_columns(["h2o"], [33])[0], OPTIONS),
        key_of(loaded, texts[0], make_columns(["h2o:recent=20"], [32])[0], OPTIONS),
        key_of(loaded, texts[0], make_columns(["h2-only"], [32])[0], OPTIONS),
        key_of(loaded, texts[0], column, replace(OPTIONS, chunk=8)),
        key_of(loaded, texts[0], column, replace(OPTIONS, per_head="query")),
        key_of(loaded, texts[0], column, replace(OPTIONS, evict="token")),
        key_of(loaded, texts[0], column, replace(OPTIONS, kv_bits=8)),
        key_of(loaded, texts[0], column, replace(OPTIONS, kv_bits=4)),
        key_of(replace(loaded, fingerprint="another"), texts[0], column, OPTIONS),
        key_of(replace(loaded, dtype=torch.bfloat16), texts[0], column, OPTIONS),
    }
    assert len(keys) == 12
    assert key_of(loaded, texts[0], make_columns(["h2o:recent=14"], [32])[0], OPTIONS) in keys, "the default, spelt out"


@pytest.mark.parametrize("damage", ["json", "npy", "cut"])
def test_a_damaged_cell_is_run_again(loaded, texts, tmp_path, damage):
    wanted = plan(loaded, texts[:1], make_columns(["h2o"], [16]))
    (before,) = run_cells(loaded, wanted, tmp_path, OPTIONS)
    (result,) = (tmp_path / "cells").glob("*.json")
    if damage == "json":
        result.write_text("{")
    elif damage == "npy":
        result.with_suffix(".npy").write_bytes(b"")
    else:
        np.save(result.with_suffix(".npy"), before.losses[:-1])
    started = []
    (after,) = run_cells(loaded, wanted, tmp_path, OPTIONS, display=Titles(started))
    assert len(started) == 1
    assert np.array_equal(after.losses, before.losses)
    assert list(run_cells(loaded, wanted, tmp_path, OPTIONS, display=Titles(started)))
    assert len(started) == 1


def test_against_full_is_the_plain_model_on_the_whole_text(loaded, cells):
    full = [cell for cell in cells if cell.column.cache is None]
    assert len(full) == 2
    for cell in full:
        ids = torch.from_numpy(np.concatenate([part.block.ids for part in cell.text.reads]))[None]
        assert np.allclose(cell.losses, dense_losses(loaded.model, ids)[0].numpy(), atol=1e-4)


def test_slots_for_each_query_head_take_a_group_times_the_memory(loaded, texts, tmp_path):
    wanted = plan(loaded, texts[:1], make_columns(["h2o"], [16]))
    (grouped,) = run_cells(loaded, wanted, tmp_path, OPTIONS)
    (apart,) = run_cells(loaded, wanted, tmp_path, replace(OPTIONS, per_head="query"))
    assert apart.result["kv_bytes"] == 4 * grouped.result["kv_bytes"]
    assert apart.result["nll_sum"] != grouped.result["nll_sum"]


def test_a_text_longer_than_the_model_has_no_full_cell(loaded):
    text = read(loaded, TEXT * 30)
    assert text.length > loaded.trained_positions
    assert plan(loaded, [text], [], against_full=True) == []


def test_knobs_stand_after_colons():
    (column,) = make_columns(["streamh2o:decay=0.5:positions=rolled:recent=20"], [32])
    assert column.policy == make_policy("streamh2o", 32, recent=20, decay=0.5, positions="rolled")


def test_sinks_are_for_policies_that_keep_sinks():
    columns = make_columns(["h2o", "local", "h2o:sinks=1"], [32], sinks=2)
    assert [column.policy.sinks for column in columns] == [2, 0, 1]


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("h3o", "No policy is called"),
        ("h2o:recent", "NAME:KNOB=VALUE"),
        ("h2o:colour=3", "no knob 'colour'"),
        ("h2o:cache=3", "cache is no knob"),
        ("h2o:recent=30.0", "--recent is 30.0; it must be a whole number"),
        ("h2o:sinks=few", "--sinks is 'few'; it must be a whole number"),
        ("streamh2o:far=2.5", "--far is 2.5; it must be a whole number"),
        ("h2o:decay=fast", "--decay is 'fast'; it must be a number"),
        ("h2o:positions=3", "--positions is 3; it must be rolled or distance"),
    ],
)
def test_a_wrong_policy_is_named(spec, rule):
    with pytest.raises(UsageError, match=rule):
        make_columns([spec], [32])


def test_a_budget_that_the_model_cannot_hold_is_refused_before_anything_runs(loaded):
    with pytest.raises(UsageError, match="--cache 600"):
        check_columns(loaded, make_columns(["h2o"], [16, 600]), OPTIONS)


def test_an_empty_text_is_an_error_that_names_it(loaded, tmp_path):
    wanted = plan(loaded, [read(loaded, "", "nothing.txt")], make_columns(["h2o"], [16]))
    with pytest.raises(UserError, match=r"nothing\.txt"):
        list(run_cells(loaded, wanted, tmp_path, OPTIONS))


def test_a_folder_that_cannot_be_made_is_an_error_before_the_first_cell(loaded, texts, tmp_path):
    (tmp_path / "file").write_text("")
    started: list = []
    cells = run_cells(
        loaded,
        plan(loaded, texts, make_columns(["h2o"], [16])),
        tmp_path / "file",
        OPTIONS,
        display=Titles(started),
    )
    with pytest.raises(UserError, match="choose another --out"):
        list(cells)
    assert not started


def compare_arguments(folder, book, out, *more):
    return [
        *("compare", str(book), "--model", str(folder), "--dtype", "float32", "--threads", "1", "--chunk", "16"),
        *("--cache", "16,32", "--policy", "h2o,streamingllm", "--out", str(out), *more),
    ]


def test_the_command_prints_a_table_and_leaves_its_files(folder, tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text(TEXT * 3)
    with pytest.raises(SystemExit) as exit_:
        command(compare_arguments(folder, book, tmp_path / "out", "--quiet", "--against-full"))
    assert exit_.value.code == 0
    shown = capsys.readouterr()
    assert "to StreamingLLM" in shown.out
    assert shown.err == ""
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("cells", "compare.json", "compare.parquet", "running.png", "budget.png")
    }
    assert len(list((tmp_path / "out" / "cells").glob("*.json"))) == 5


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (("--cache", "16;32"), "not a whole number"),
        (("--policy", ","), "names nothing"),
        (("--cache", "3"), "leaves no slot"),
        (("--cache", "500"), "positions"),
        (("--from", "100000"), "tokens only"),
    ],
)
def test_bad_usage_exits_with_2_and_one_sentence(folder, tmp_path, capsys, more, rule):
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    with pytest.raises(SystemExit) as exit_:
        command([*compare_arguments(folder, book, tmp_path / "out"), *more])
    shown = capsys.readouterr()
    assert exit_.value.code == 2
    assert rule in shown.err
    assert shown.out == ""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_ctrl_c_keeps_the_finished_cells_and_exits_with_130(folder, tmp_path):
    book, out = tmp_path / "book.txt", tmp_path / "out"
    book.write_text(TEXT * 80)
    arguments = compare_arguments(folder, book, out)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-m", "streamh2o.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    end = time.monotonic() + 300
    while not list(out.glob("cells/*.json")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, noise = process.communicate(timeout=300)
    assert process.returncode == 130, noise.decode()
    finished = list(out.glob("cells/*.json"))
    assert 0 < len(finished) < 4
    assert b"to StreamingLLM" in shown
    written = json.loads((out / "compare.json").read_text())
    assert written["complete"] is False
    assert len(written["cells"]) == len(finished)
    times = {path: path.stat().st_mtime_ns for path in finished}
    with pytest.raises(SystemExit) as exit_:
        command([*arguments, "--quiet"])
    assert exit_.value.code == 0
    assert len(json.loads((out / "compare.json").read_text())["cells"]) == 4
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
