import json

import pytest

from streamh2o.errors import UserError
from streamh2o.runs.curve import Curve, read_log


def test_a_curve_of_a_million_points_stays_small_and_keeps_its_shape():
    curve = Curve("long")
    for token in range(1_000_000):
        curve.add(token, float(token), 1.0)
    assert 1000 < len(curve.tokens) <= 4097
    steps = {b - a for a, b in zip(curve.tokens, curve.tokens[1:], strict=False)}
    assert len(steps) == 1
    assert curve.tokens == [int(p) for p in curve.ppl]


def log_line(token: int, **extra) -> str:
    return json.dumps({"token": token, "ppl": 20.0, "ppl_window": 19.0} | extra) + "\n"


def test_a_log_gives_a_curve_for_each_of_its_inputs(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(log_line(1, input="a") + log_line(2, input="a") + log_line(1, input="b"))
    assert [(curve.label, curve.tokens) for curve in read_log(path)] == [("a", [1, 2]), ("b", [1])]


def test_a_line_cut_off_at_the_end_of_a_log_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(log_line(1) + log_line(2)[:-9])
    assert read_log(path)[0].tokens == [1]
    path.write_text(log_line(1)[:-9] + "\n" + log_line(2))
    with pytest.raises(UserError, match="line 1"):
        read_log(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\xff\xfe", b"[1]\n", b'{"token": 1, "ppl": null, "ppl_window": null}\n']
)
def test_what_is_no_log_is_one_sentence(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.jsonl"):
        read_log(path)
    with pytest.raises(UserError, match="no such file"):
        read_log(tmp_path / "missing")
