"""Losses stand in the order of the inputs, in whatever order their chunks come."""

import json

import numpy as np
import pytest

from streamh2o.errors import UserError
from streamh2o.runs.run_files import InOrder, RunFiles
from streamh2o.text.sources import Source
from tests.runs.test_growing_file import progress

SOURCES = [Source(name, None, lambda: None) for name in "abc"]


@pytest.mark.parametrize("order", ["aabbcc", "abcabc", "cbacba", "bbaacc", "ccabab"])
def test_the_file_of_losses_follows_the_inputs_and_the_log_the_clock(tmp_path, order):
    with RunFiles(SOURCES, tmp_path / "log.jsonl", tmp_path / "losses.npy") as files:
        left = {name: order.count(name) for name in "abc"}
        for step, name in enumerate(order):
            left[name] -= 1
            ended = {"abc".index(other) for other, count in left.items() if not count}
            files.add("abc".index(name), progress([float(step)], name=name, token=step, ppl=2.0), ended)
        files.finish()
    expected = [float(step) for name in "abc" for step, each in enumerate(order) if each == name]
    assert np.load(tmp_path / "losses.npy").tolist() == expected
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert "".join(line["input"] for line in lines) == order
    assert [curve.tokens for curve in files.curves] == [
        [step for step, each in enumerate(order) if each == name] for name in "abc"
    ]


def test_what_waits_is_handed_on_when_no_input_gives_more():
    seen = []
    order = InOrder(seen.append)
    for number, name in ((2, "late"), (1, "middle"), (0, "first")):
        order.add(number, name)
    assert seen == ["first"]
    order.finish()
    assert seen == ["first", "middle", "late"]


def test_files_are_closed_where_the_second_cannot_be_opened(tmp_path):
    files = RunFiles(SOURCES, tmp_path / "log.jsonl", tmp_path / "missing" / "losses.npy")
    with pytest.raises(UserError, match=r"losses\.npy"), files:
        pass
    assert files._write_log._file.closed
