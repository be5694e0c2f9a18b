"""Results of running perplexity as a list of facts or a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamh2o.terminal import count, decimal, duration, make_facts, make_table, safe_text, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADERS = ("input", "tokens", "ppl", "ppl/word", "bits/byte", "tokens/s", "evictions", "keys+values")


def render_perplexity(results: Sequence[dict[str, Any]]) -> RenderableType:
    """Results of `PerplexityRun` for people: a list of facts for one input, a row each for several."""
    return _facts(results[0]) if len(results) == 1 else _rows(results)


def _facts(result: dict[str, Any]) -> RenderableType:
    bos = "after 1 BOS" if result["bos"] else "no BOS"
    knobs = f"{count(result['sinks'])} sinks + {count(result['hitters'])} hitters + {count(result['recent'])} recent"
    integers = f" at {result['kv_bits']} bits" if result.get("kv_bits", 16) < 16 else ""
    facts = [
        ("tokens", f"{count(result['tokens'])} ({count(result['scored'])} scored, {bos})"),
        ("perplexity", f"{decimal(result['ppl'])} per token, {decimal(result['ppl_word'])} per word"),
        ("bits per byte", f"{decimal(result['bits_per_byte'], 4)} over {count(result['input']['bytes'])} bytes"),
        ("loss", f"{decimal(result['nll_mean'], 4)} nats a token, {decimal(result['nll_sum'], 1)} in all"),
        ("speed", f"{decimal(result['tokens_per_second'], 0)} tokens/s, {duration(result['seconds'])}"),
        ("cache", f"{result['policy']}, {count(result['cache'])} slots = {knobs}"),
        ("evictions", f"{count(result['evictions'])}, at most {count(result['max_slots'])} slots held"),
        ("memory", f"{size(result['kv_bytes'])} keys and values{integers}, {size(result['peak_rss_bytes'])} peak"),
        ("model", f"{result['model']['name']}, {result['dtype']} on {result['device']}"),
    ]
    return make_facts(_name(result), facts)


def _rows(results: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.console import Group

    rows = [
        (
            _name(result),
            count(result["tokens"]),
            decimal(result["ppl"]),
            decimal(result["ppl_word"]),
            decimal(result["bits_per_byte"], 4),
            decimal(result["tokens_per_second"], 0),
            count(result["evictions"]),
            size(result["kv_bytes"]),
        )
        for result in results
    ]
    last = results[-1]
    below = f"{last['policy']}, {count(last['cache'])} slots; {last['model']['name']}, {last['dtype']}"
    if "batch" in last:
        below += f", {count(last['batch'])} inputs at a time"
    below += f", peak memory {size(last['peak_rss_bytes'])}"
    return Group(make_table(_HEADERS, rows), safe_text(below, "dim"))


def _name(result: dict[str, Any]) -> str:
    return result["input"]["name"] + ("" if result["complete"] else " (incomplete)")
