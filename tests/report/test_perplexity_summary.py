from streamh2o.report.perplexity_summary import render_perplexity
from streamh2o.terminal import as_text

RESULT = {
    "input": {"name": "book.txt", "bytes": 4000, "words": 800},
    "model": {"name": "smollm2-135m"},
    "policy": "h2o",
    "cache": 512,
    "sinks": 4,
    "hitters": 254,
    "recent": 254,
    "dtype": "bfloat16",
    "device": "cpu",
    "tokens": 1201,
    "scored": 1200,
    "bos": False,
    "nll_sum": 3600.0,
    "nll_mean": 3.0,
    "ppl": 20.0855,
    "bits_per_byte": 1.2984,
    "ppl_word": 90.017,
    "seconds": 61.0,
    "tokens_per_second": 19.7,
    "peak_rss_bytes": 900_000_000,
    "kv_bytes": 11_796_480,
    "max_slots": 512,
    "evictions": 4,
    "complete": True,
}


def test_the_summary_of_one_input_names_the_counts_behind_every_number():
    text = as_text(render_perplexity([RESULT]))
    for part in ("book.txt", "1,201 (1,200 scored, no BOS)", "20.09 per token", "90.02 per word", "4,000 bytes"):
        assert part in text
    assert "incomplete" not in text
    assert "book.txt (incomplete)" in as_text(render_perplexity([RESULT | {"complete": False}]))
    assert " bits, " not in text
    assert "keys and values at 4 bits, " in as_text(render_perplexity([RESULT | {"kv_bits": 4}]))


def test_the_summary_of_nothing_scored_has_dashes():
    nothing = {"ppl": None, "ppl_word": None, "bits_per_byte": None, "nll_mean": None, "tokens_per_second": None}
    assert "- per token, - per word" in as_text(render_perplexity([RESULT | nothing]))


def test_several_inputs_get_a_row_each():
    rows = as_text(render_perplexity([RESULT, RESULT | {"input": {"name": "b\x1b.txt"}}])).splitlines()
    assert rows[2].split()[:3] == ["book.txt", "1,201", "20.09"]
    assert rows[3].startswith(r"b\x1b.txt")
