"""A command line called in this process."""

import io
import re
import signal

import pytest
import torch

from streamh2o.cli.main import run


def call_streamh2o(capsys, monkeypatch):
    """A function that calls `streamh2o` with its arguments; gives exit code, stdout and stderr."""

    def call(*arguments, stdin: bytes | None = None):
        before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
        # A shell's background job ignores Ctrl-C, and so would the program.
        ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
        with monkeypatch.context() as patch:
            if stdin is not None:
                patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            capsys.readouterr()
            try:
                with pytest.raises(SystemExit) as ended:
                    run([str(argument) for argument in arguments])
            finally:
                signal.signal(signal.SIGTERM, before)
                signal.signal(signal.SIGINT, ctrl_c)
                torch.set_num_threads(threads)
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


def one_sentence(err: str) -> str:
    """The only line of stderr, without the program's name."""
    assert re.fullmatch(r"streamh2o: error: [^\n]+\n", err), err
    return err.removeprefix("streamh2o: error: ").rstrip()
