"""Results of perplexity over windows, as other tools define it, as a list of facts or a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamh2o.terminal import count, decimal, duration, make_facts, make_table, safe_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADERS = ("input", "tokens", "divided by", "ppl", "ppl/word", "ppl/byte")


def render_windowed(results: Sequence[dict[str, Any]]) -> RenderableType:
    """Results of `WindowedRun` for people: a list of facts for one input, a row each for several."""
    return _facts(results[0]) if len(results) == 1 else _rows(results)


def _facts(result: dict[str, Any]) -> RenderableType:
    facts = [("definition", _definition(result)), ("perplexity", f"{decimal(result['ppl'], 4)} per token")]
    if result["ppl_word"] is not None:
        facts.append(("", f"{decimal(result['ppl_word'], 4)} per word, {decimal(result['ppl_byte'], 4)} per byte"))
        facts.append(("bits per byte", decimal(result["bits_per_byte"], 4)))
    facts += [
        ("tokens", f"{count(result['tokens'])}, divided by {count(result['scored'])}"),
        ("speed", f"{decimal(result['tokens_per_second'], 0)} tokens/s, {duration(result['seconds'])}"),
        ("model", f"{result['model']['name']}, {result['dtype']} on {result['device']}"),
    ]
    return make_facts(_name(result), facts)


def _rows(results: Sequence[dict[str, Any]]) -> RenderableType:
    from rich.console import Group

    rows = [
        (
            _name(result),
            count(result["tokens"]),
            count(result["scored"]),
            decimal(result["ppl"], 4),
            decimal(result["ppl_word"], 4),
            decimal(result["ppl_byte"], 4),
        )
        for result in results
    ]
    last = results[-1]
    below = f"{_definition(last)}; {last['model']['name']}, {last['dtype']}"
    return Group(make_table(_HEADERS, rows), safe_text(below, "dim"))


def _name(result: dict[str, Any]) -> str:
    return result["input"]["name"] + ("" if result["complete"] else " (incomplete)")


def _definition(result: dict[str, Any]) -> str:
    stride = "" if result["stride"] is None else f", {count(result['stride'])} apart"
    return f"{result['definition']}, {count(result['windows'])} windows of {count(result['context'])} tokens{stride}"
