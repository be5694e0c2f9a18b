"""`streamh2o` in processes of its own, which are killed, starved and waited for."""

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def _program(arguments: list[str], folder: str, file_size: int | None, stdin: str | None) -> None:
    """What a started process does: `streamh2o`, its output in two files of `folder`."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
    if stdin is not None:
        import sys

        os.dup2(os.open(stdin, os.O_RDONLY), 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are a shell's background job
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    from streamh2o.cli.main import run

    run(arguments)


@contextmanager
def starter() -> Iterator[Any]:
    """A function that starts `streamh2o` by a fork of a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "tests.programs"])
    started = []

    def begin(folder: Path, *arguments, file_size: int | None = None, stdin: Path | None = None):
        line = [str(one) for one in arguments]
        given = None if stdin is None else str(stdin)
        process = context.Process(target=_program, args=(line, str(folder), file_size, given))
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for(condition, process, seconds: float = 120) -> None:
    """Until `condition()` holds or the process has ended."""
    end = time.monotonic() + seconds
    while process.is_alive() and not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def ended(process, seconds: float = 120) -> int:
    process.join(seconds)
    return process.exitcode
