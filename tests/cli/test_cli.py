import io
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from streamh2o.cli.main import COMMANDS, run
from tests.tiny_folder import TEXT, make_folder

SMALL = ("--cache", "64", "--chunk", "32", "--dtype", "float32", "--device", "cpu", "--threads", "1")
PROGRAM = [sys.executable, "-m", "streamh2o"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{number}. {TEXT}" for number in range(10)))
    return path


@pytest.fixture
def streamh2o(capsys, monkeypatch):
    """Calls a command line in this process; gives exit code, stdout and stderr."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments, stdin: bytes | None = None):
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def one_sentence(err: str) -> str:
    """The only line of stderr, without the program's name."""
    assert re.fullmatch(r"streamh2o: error: [^\n]+\n", err), err
    return err.removeprefix("streamh2o: error: ").rstrip()


def test_ctrl_c_while_the_command_line_is_being_imported_ends_quietly(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [*PROGRAM, "--help"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# The command line itself


@pytest.mark.parametrize("arguments", [["--help"], ["ppl", "--help"], ["--version"]])
def test_help_takes_less_than_half_a_second_of_one_core(arguments):
    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*PROGRAM, *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) < 0.5


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from streamh2o.cli.main import run\n"
        "try: run(['ppl', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib', 'rich', 'datasets') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.endswith("[]\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(streamh2o, command):
    code, out, err = streamh2o(command, "--help")
    assert (code, err) == (0, "")
    assert "Example" in out
    assert f"streamh2o {command}" in out


def test_the_help_names_every_command_and_every_policy(streamh2o):
    from streamh2o.policies import POLICIES

    _, out, _ = streamh2o("--help")
    assert all(f"  {command} " in out for command in COMMANDS)
    _, out, _ = streamh2o("ppl", "--help")
    unwrapped = re.sub(r"\s+", "", out)
    assert all(policy.removesuffix("+h2") in unwrapped for policy in POLICIES)


def test_without_arguments_help_comes_with_the_code_of_bad_usage(streamh2o):
    code, out, _ = streamh2o()
    assert code == 2
    assert out.startswith("Usage: streamh2o")


def test_a_mistyped_command_is_guessed(streamh2o):
    code, out, err = streamh2o("pplx")
    assert (code, out) == (2, "")
    assert "did you mean ppl?" in one_sentence(err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ppl"], "INPUT"),
        (["ppl", "a.txt", "--chache", "1"], "--chache"),
        (["ppl", "a.txt", "--cache", "many"], "--cache"),
        (["--nothing"], "--nothing"),
    ],
)
def test_bad_usage_is_one_sentence_and_code_2(streamh2o, arguments, said):
    code, out, err = streamh2o(*arguments)
    assert (code, out) == (2, "")
    assert said in one_sentence(err)
    assert "--help" in err


def test_a_traceback_is_shown_only_with_debug(streamh2o, tmp_path):
    assert "Traceback" not in streamh2o("ppl", tmp_path)[2]
    assert "Traceback" in streamh2o("ppl", tmp_path, "--debug")[2]


def test_an_error_of_our_own_is_one_sentence_too(streamh2o, monkeypatch, book):
    def broken(*_):
        raise RuntimeError("two\nlines\x1b[31m")

    monkeypatch.setattr("streamh2o.text.sources.open_inputs", broken)
    code, _, err = streamh2o("ppl", book)
    assert code == 1
    assert r"RuntimeError: two lines\x1b[31m (this should not happen" in one_sentence(err)


# Results


def test_the_summary_goes_to_stdout_and_the_files_agree_with_it(streamh2o, model, book, tmp_path):
    outputs = {name: tmp_path / name for name in ("a.json", "a.jsonl", "a.npy", "a.png")}
    code, out, err = streamh2o(
        *("ppl", book, "--model", model, *SMALL, "--json", outputs["a.json"], "--log", outputs["a.jsonl"]),
        *("--nll-out", outputs["a.npy"], "--plot", outputs["a.png"]),
    )
    assert (code, err) == (0, "")
    result = json.loads(outputs["a.json"].read_text())
    assert f"{result['ppl']:,.2f} per token" in out
    losses = np.load(outputs["a.npy"])
    assert losses.dtype == np.float32
    assert len(losses) == result["scored"] == result["tokens"] - 1
    assert losses.sum(dtype=np.float64) == pytest.approx(result["nll_sum"], rel=1e-12)
    log = [json.loads(line) for line in outputs["a.jsonl"].read_text().splitlines()]
    assert len(log) == -(-result["tokens"] // 32)
    assert sum(line["nll"] for line in log) == pytest.approx(result["nll_sum"], rel=1e-12)
    assert sum(line["n"] for line in log) == result["scored"]
    assert (log[-1]["token"], log[-1]["byte"], log[-1]["ppl"]) == (
        result["tokens"],
        result["input"]["bytes"],
        result["ppl"],
    )
    assert outputs["a.png"].read_bytes().startswith(b"\x89PNG")


def test_the_json_holds_what_the_design_promises(streamh2o, model, book):
    code, out, err = streamh2o("ppl", book, "--model", model, *SMALL, "--json", "-")
    assert (code, err) == (0, "")
    result = json.loads(out)
    promised = (
        "schema input model policy cache sinks recent hitters chunk dtype device tokens scored nll_sum nll_mean ppl "
        "bits_per_byte ppl_word seconds tokens_per_second peak_rss_bytes kv_bytes max_slots evictions complete versions"
    )
    assert set(promised.split()) <= set(result)
    assert {"name", "bytes", "sha256"} <= set(result["input"])
    assert result["schema"] == 1
    assert result["cache"] == result["sinks"] + result["hitters"] + result["recent"] == 64
    assert result["peak_rss_bytes"] > result["kv_bytes"] > 0


def test_stdin_gives_the_same_digits_as_the_file(streamh2o, model, book):
    results = []
    for name, stdin in ((book, None), ("-", book.read_bytes())):
        _, out, _ = streamh2o("ppl", name, "--model", model, *SMALL, "--json", "-", stdin=stdin)
        results.append(json.loads(out))
    assert results[1]["input"].pop("name") == "stdin"
    del results[0]["input"]["name"]
    for key in ("input", "nll_sum", "ppl", "bits_per_byte", "ppl_word", "tokens", "scored"):
        assert results[0][key] == results[1][key]


def test_several_inputs_get_a_row_and_a_json_line_each(streamh2o, model, book, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT)
    log, losses, plot = tmp_path / "a.jsonl", tmp_path / "a.npy", tmp_path / "a.svg"
    code, out, _ = streamh2o(
        *("ppl", book, other, "--model", model, *SMALL, "--json", tmp_path / "a.json"),
        *("--log", log, "--nll-out", losses, "--plot", plot),
    )
    assert code == 0
    assert re.search(rf"^{re.escape(str(other))} +\d", out, re.MULTILINE)
    results = [json.loads(line) for line in (tmp_path / "a.json").read_text().splitlines()]
    assert [result["input"]["name"] for result in results] == [str(book), str(other)]
    assert len(np.load(losses)) == sum(result["scored"] for result in results)
    assert {json.loads(line)["input"] for line in log.read_text().splitlines()} == {str(book), str(other)}
    assert "other.txt: " in plot.read_text()


def test_an_empty_and_a_one_token_input_are_defined_and_explained(streamh2o, model, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "one").write_text("a")
    code, out, err = streamh2o(
        *("ppl", tmp_path / "empty", tmp_path / "one", "--model", model, *SMALL, "--json", "-"),
        *("--plot", tmp_path / "a.png"),
    )
    assert code == 0
    results = [json.loads(line) for line in out.splitlines()]
    assert [(r["tokens"], r["scored"], r["ppl"], r["complete"]) for r in results] == [
        (0, 0, None, True),
        (1, 0, None, True),
    ]
    assert "empty: is empty" in err
    assert "one token" in err
    assert streamh2o("ppl", tmp_path / "empty", "--model", model, *SMALL, "--quiet")[2] == ""


def test_max_tokens_reads_no_more(streamh2o, model, book):
    _, out, _ = streamh2o("ppl", book, "--model", model, *SMALL, "--max-tokens", 100, "--json", "-")
    result = json.loads(out)
    assert (result["tokens"], result["scored"], result["input"]["whole"]) == (100, 99, False)


def test_the_knobs_of_the_policy_reach_the_result(streamh2o, model, book):
    _, out, _ = streamh2o(
        *("ppl", book, "--model", model, *SMALL, "--max-tokens", 90, "--json", "-", "--sinks", 2, "--hitters", 10),
        *("--far", 5, "--decay", 0.5, "--positions", "rolled"),
    )
    result = json.loads(out)
    knobs = ("sinks", "hitters", "recent", "far", "decay", "positions")
    assert [result[knob] for knob in knobs] == [2, 10, 52, 5, 0.5, "rolled"]


def test_a_picture_from_logs(streamh2o, model, book, tmp_path):
    streamh2o("ppl", book, "--model", model, *SMALL, "--log", tmp_path / "a$b.jsonl")
    code, out, err = streamh2o("plot", tmp_path / "a$b.jsonl", "--plot", tmp_path / "both.svg")
    assert (code, out, err) == (0, f"{tmp_path / 'both.svg'}\n", "")
    assert "a$b: " in (tmp_path / "both.svg").read_text()
    code, out, err = streamh2o("plot", tmp_path / "gone.jsonl", "--plot", tmp_path / "b.svg")
    assert (code, out) == (1, "")
    assert "no such file" in one_sentence(err)


# What users get wrong


def test_wrong_inputs_are_one_sentence_each(streamh2o, model, tmp_path):
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes("été\n".encode("latin-1") * 3)
    for name, said in (
        (tmp_path, "folder"),
        (tmp_path / "gone.txt", "no such file"),
        (tmp_path / "*.nothing", "no file matches"),
        (latin1, "byte 0 (0xe9)"),
        (tmp_path / "gone\x1b[31m.txt", r"gone\x1b[31m.txt"),
    ):
        code, out, err = streamh2o("ppl", name, "--model", model, *SMALL)
        assert (code, out) == (1, "")
        assert said in one_sentence(err)
    assert streamh2o("ppl", latin1, "--model", model, *SMALL, "--errors", "replace")[0] == 0


def test_what_stands_before_a_bad_byte_is_scored_however_short(streamh2o, model, tmp_path):
    cut = tmp_path / "cut.txt"
    cut.write_bytes(TEXT.encode() + "é".encode()[:1])
    code, out, err = streamh2o("ppl", cut, "--model", model, *SMALL, "--json", "-")
    assert code == 1
    assert "ends inside a UTF-8 character" in one_sentence(err)
    result = json.loads(out)
    assert not result["complete"]
    assert result["input"]["bytes"] == len(TEXT.encode())
    assert result["scored"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache", "4"], "at least 5"),
        (["--cache", "600"], "512"),
        (["--cache", "500", "--chunk", "64"], "512"),
        (["--chunk", "0"], "--chunk"),
        (["--policy", "best"], "streamingllm"),
        (["--policy", "streamingllm", "--hitters", "8"], "hitters"),
        (["--dtype", "int8"], "float32"),
        (["--device", "toaster"], "cpu"),
        (["--bos", "maybe"], "auto"),
        (["--newline", "crlf"], "keep or lf"),
        (["--positions", "true"], "rolled or distance"),
        (["--errors", "ignore"], "replace"),
        (["--threads", "0"], "--threads"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--plot", "a.gif"], ".png"),
        (["--json", "missing/a.json"], "no folder"),
        (["--log", "missing/a.jsonl"], "no folder"),
        (["--nll-out", "missing/a.npy"], "no folder"),
    ],
)
def test_impossible_settings_are_one_sentence_and_code_2(streamh2o, model, book, options, said):
    code, out, err = streamh2o("ppl", book, "--model", model, *SMALL, *options)
    assert (code, out) == (2, ""), err
    assert said in one_sentence(err)


def test_an_input_survives_being_named_as_output(streamh2o, model, tmp_path):
    book = tmp_path / "book.txt"
    for option in ("--json", "--log", "--nll-out"):
        book.write_text(TEXT)
        code, _, err = streamh2o("ppl", book, "--model", model, *SMALL, option, tmp_path / "." / "book.txt")
        assert code == 2
        assert "overwrite" in one_sentence(err)
        assert book.read_text() == TEXT


def test_a_full_disk_ends_the_run_with_the_summary_so_far(streamh2o, model, book):
    code, out, err = streamh2o("ppl", book, "--model", model, *SMALL, "--log", "/dev/full")
    assert code == 1
    assert "no space left" in one_sentence(err)
    assert "(incomplete)" in out


# Processes: signals, pipes, terminals


def start(*arguments, **how) -> subprocess.Popen:
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], **how)


def wait_for(condition, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_for_a_pipe_ends_with_the_result_so_far(model, tmp_path, number):
    log = tmp_path / "a.jsonl"
    options = (
        "--log",
        log,
        "--nll-out",
        tmp_path / "a.npy",
        "--json",
        tmp_path / "a.json",
        "--plot",
        tmp_path / "a.png",
    )
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = start("ppl", "-", "--model", model, *SMALL, "--quiet", *options, stdout=out, stderr=err)
    process.stdin.write(b"".join(b"%d. " % n + TEXT.encode() for n in range(1000)))
    process.stdin.flush()
    wait_for(lambda: log.exists() and log.stat().st_size > 0)
    process.send_signal(number)
    assert process.wait(timeout=180) == 130  # while the pipe is still open
    process.stdin.close()
    assert (tmp_path / "err").read_text() == ""
    assert "stdin (incomplete)" in (tmp_path / "out").read_text()
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["complete"] is False
    assert result["scored"] == len(np.load(tmp_path / "a.npy")) > 0
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["token"], last["byte"]) == (result["tokens"], result["input"]["bytes"])
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("spoiled", [False, True])
def test_a_signal_before_anything_was_read_ends_quietly_with_130(streamh2o, monkeypatch, number, spoiled):
    def interrupted(*_):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if spoiled:  # as some libraries do while they are imported
                raise ImportError("interrupted") from None
            raise

    monkeypatch.setattr("streamh2o.text.sources.open_inputs", interrupted)
    assert streamh2o("ppl", "book.txt") == (130, "", "")


def test_a_reader_that_leaves_ends_the_program_quietly(model, book):
    process = start("ppl", book, "--model", model, *SMALL)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=180) == 1
    assert err == b""


def test_with_json_on_stdout_a_pipe_gets_json_only_and_stderr_stays_clean(model, book):
    done = subprocess.run(
        [*PROGRAM, "ppl", "-", "--model", model, *SMALL, "--json", "-"], input=book.read_bytes(), capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["complete"]


def test_a_terminal_gets_the_live_display_and_its_cursor_back(model, tmp_path):
    path = tmp_path / "book\x1b]0;title\x07.txt"
    path.write_text(TEXT * 60)
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = start("ppl", path, "--model", model, *SMALL, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        ready, _, _ = select.select([master], [], [], 180)
        assert ready, "the display stopped"
        try:
            data = os.read(master, 65536)
        except OSError:  # the other side has closed
            break
        if not data:
            break
        shown += data
    os.close(master)
    out = process.stdout.read()
    assert process.wait(timeout=180) == 0
    for part in (b"book\\x1b]0;title\\x07.txt", b"%", b"sinks", b"hitters", b"tokens", b"memory", b"left"):
        assert part in shown
    assert b"\x1b]0;" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    assert b"\x1b" not in out


def test_without_a_terminal_lines_come_on_stderr_only(model, book, tmp_path):
    environment = os.environ | {"TERM": "xterm", "FORCE_COLOR": "1"}
    path = Path(tmp_path / "slow.txt")
    path.write_text(TEXT * 8000)
    process = start("ppl", path, "--model", model, *SMALL, "--chunk", "1", env=environment)
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert re.match(rb".*slow\.txt: \d+\.\d%, [\d,]+ tokens, .* left\n", line)
    assert b"\x1b" not in line + err + out
    assert b"slow.txt (incomplete)" in out


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lose_nothing_else(model, book, tmp_path, closed):
    options = f"--model {model} --cache 32 --chunk 16 --json {tmp_path}/out.json --log {tmp_path}/log.jsonl"
    line = f"{sys.executable} -m streamh2o ppl {book} {options} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert json.loads((tmp_path / "out.json").read_text())["tokens"] > 200
    assert all(json.loads(each) for each in (tmp_path / "log.jsonl").read_text().splitlines())


@pytest.mark.parametrize("command", ["ppl", "ppl --help", "models"])
def test_a_full_disk_under_stdout_is_said_in_a_sentence(model, book, command):
    options = f" {book} --model {model} --cache 32 --chunk 16 --quiet" if command == "ppl" else ""
    line = f"{sys.executable} -m streamh2o {command}{options} > /dev/full"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith("can't be written (no space left on device); free some space or send it elsewhere.\n")
    assert done.stderr.count("\n") == 1
