"""A comparison of a tiny model: rows, means, tables, files and pictures."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamh2o.report.comparison import _standard_error, document, means, rows, write_parquet
from streamh2o.report.comparison_plots import _spread, plot_budget, plot_running
from streamh2o.report.comparison_tables import render_comparison
from streamh2o.runs.compare import make_columns, plan, run_cells
from streamh2o.terminal import as_text
from tests.runs.test_compare import OPTIONS, read
from tests.tiny_folder import TEXT


@pytest.fixture(scope="module")
def cells(loaded, tmp_path_factory):
    texts = [read(loaded, TEXT * 3, "one.txt"), read(loaded, TEXT[40:] * 3, "two.txt")]
    wanted = plan(loaded, texts, make_columns(["streamh2o", "h2o", "streamingllm"], [16, 32]), against_full=True)
    return list(run_cells(loaded, wanted, tmp_path_factory.mktemp("cells"), OPTIONS))


def test_changes_are_to_streamingllm_at_the_same_budget(cells):
    for row in rows(cells):
        (reference,) = [
            other["ppl"]
            for other in rows(cells)
            if (other["input"], other["cache"], other["policy"]) == (row["input"], row["cache"], "streamingllm")
        ] or [None]
        if reference is None:
            assert row["cache"] is None
            assert row["change"] is None
        else:
            assert row["change"] == pytest.approx(100 * (row["ppl"] / reference - 1))


def test_counting_from_a_token_on_leaves_the_losses_before_it_out(cells):
    whole, part = rows(cells), rows(cells, 40)
    for cell, before, row in zip(cells, whole, part, strict=True):
        losses = cell.losses[-(cell.text.tokens - 40) :].astype(np.float64)
        assert row["scored"] == len(losses) == before["tokens"] - 40
        assert row["ppl"] == pytest.approx(math.exp(losses.mean()))
        assert row["bits_per_byte"] is None, "the bytes of a part are not known"
        assert (before["first"], row["first"]) == (0, 40)
    assert "tokens, from token 40 on" in as_text(render_comparison(part))
    assert rows(cells, 1) == [{**row, "first": 1} for row in whole], "token 0 has no loss without a BOS"


def test_the_standard_error_is_that_of_means_of_blocks():
    noise = np.random.default_rng(0).normal(0.01, 0.1, 16 * 500).astype(np.float32)
    blocks = noise.reshape(16, 500).mean(1)
    assert _standard_error(noise) == pytest.approx(100 * blocks.std(ddof=1) / 4, rel=1e-5)
    assert _standard_error(noise[: 8 * 500 - 1]) is None


def test_means_are_geometric_and_over_all_inputs(cells):
    found = {(mean["policy"], mean["cache"]): mean for mean in means(rows(cells))}
    assert len(found) == 7
    one, two = (c.result["ppl"] for c in cells if (c.column.label, c.column.cache) == ("h2o", 32))
    assert found["h2o", 32]["ppl"] == pytest.approx(math.sqrt(one * two))
    reference = found["streamingllm", 32]["ppl"]
    assert found["h2o", 32]["change"] == pytest.approx(100 * (math.sqrt(one * two) / reference - 1))
    assert len(means(rows(cells[:-1]))) == 6, "a cell that is missing on one input has no mean"
    assert means(rows(cells[:3])) == []


def test_the_table_has_a_block_an_input_and_one_of_means_the_best_first(cells):
    blocks = as_text(render_comparison(rows(cells))).split("\n\n")
    assert [block.splitlines()[0].split(",")[0] for block in blocks] == [
        "one.txt",
        "two.txt",
        "geometric mean of 2 inputs",
    ]
    lines = [line.split() for line in blocks[0].splitlines()[3:]]
    assert [line[1] for line in lines] == ["16"] * 3 + ["32"] * 3 + ["all"]
    ppls = [float(line[2].replace(",", "")) for line in lines[:3]]
    assert ppls == sorted(ppls)


def test_parquet_holds_the_rows_and_json_the_results(cells, tmp_path):
    from pyarrow import parquet

    write_parquet(cells, tmp_path / "compare.parquet")
    assert parquet.read_table(tmp_path / "compare.parquet").to_pylist() == rows(cells)
    written = json.loads(json.dumps(document(cells, True), allow_nan=False))
    assert [cell["nll_sum"] for cell in written["cells"]] == [cell.result["nll_sum"] for cell in cells]
    assert written["complete"] is True


@pytest.mark.parametrize("some", [slice(0, 1), slice(6, 7), slice(0, 3), slice(None)])
def test_both_pictures_are_drawn_for_any_part_of_the_cells(cells, tmp_path, some):
    plot_running(cells[some], tmp_path / "running.png")
    plot_budget(cells[some], tmp_path / "budget.png")
    for name in ("running", "budget"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_titles_leave_room_for_the_panel_beside(cells, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    own, titles = Axes.set_title, []
    monkeypatch.setattr(Axes, "set_title", lambda axes, text, **how: (titles.append(text), own(axes, text, **how))[1])
    monkeypatch.setattr("streamh2o.report.comparison_plots._TITLE", 14)
    plot_running(cells, tmp_path / "running.png")
    assert "one…, cache 16" in titles
    assert all(len(title) <= 14 for title in titles)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.08))
def test_labels_keep_their_order_and_their_distance(heights, gap):
    placed = _spread(sorted(heights), gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert max(placed) <= 1
