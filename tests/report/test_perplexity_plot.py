import pytest

from streamh2o.errors import UsageError, UserError
from streamh2o.report.perplexity_plot import plot_curves
from streamh2o.runs.curve import Curve


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_picture_is_written_in_the_kind_that_its_name_says(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    curves = [Curve(f"_b${n}$\x1b", [100, 200], [30.0, 25.0], [30.0, 20.0]) for n in range(9)]
    plot_curves(curves, path, title="50 $ and _")
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    if kind == "svg":
        svg = path.read_text()
        for part in ("tokens read", "perplexity per token", "_b$8$\\x1b: 25.00", "50 $ and _"):
            assert part in svg


def test_one_point_makes_a_picture_too(tmp_path):
    plot_curves([Curve("short", [5], [30.0], [30.0])], tmp_path / "a.png")


def test_a_picture_of_nothing_or_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing was scored"):
        plot_curves([Curve("empty")], tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        plot_curves([Curve("a", [1], [1.0], [1.0])], tmp_path / "a.gif")
