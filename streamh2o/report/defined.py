"""Results of perplexity as other tools define it, as aligned text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamh2o.report.tables import count, decimal, duration, table
from streamh2o.terminal_safe import visible


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Results of `DefinedRun` for people: a list of facts for one input, a row each for several."""
    return _facts(results[0]) if len(results) == 1 else _rows(results)


def _facts(result: dict[str, Any]) -> str:
    facts = [("definition", _definition(result)), ("perplexity", f"{decimal(result['ppl'], 4)} per token")]
    if result["ppl_word"] is not None:
        facts.append(("", f"{decimal(result['ppl_word'], 4)} per word, {decimal(result['ppl_byte'], 4)} per byte"))
        facts.append(("bits per byte", decimal(result["bits_per_byte"], 4)))
    facts += [
        ("tokens", f"{count(result['tokens'])}, divided by {count(result['scored'])}"),
        ("speed", f"{decimal(result['tokens_per_second'], 0)} tokens/s, {duration(result['seconds'])}"),
        ("model", f"{visible(result['model']['name'])}, {result['dtype']} on {result['device']}"),
    ]
    lines = [visible(result["input"]["name"]) + ("" if result["complete"] else " (incomplete)")]
    return "\n".join(lines + [f"  {name:<14} {value}" for name, value in facts])


def _rows(results: Sequence[dict[str, Any]]) -> str:
    headers = ("input", "tokens", "divided by", "ppl", "ppl/word", "ppl/byte")
    rows = [
        (
            result["input"]["name"] + ("" if result["complete"] else " (incomplete)"),
            count(result["tokens"]),
            count(result["scored"]),
            decimal(result["ppl"], 4),
            decimal(result["ppl_word"], 4),
            decimal(result["ppl_byte"], 4),
        )
        for result in results
    ]
    last = results[-1]
    return table(headers, rows) + f"\n{_definition(last)}; {visible(last['model']['name'])}, {last['dtype']}"


def _definition(result: dict[str, Any]) -> str:
    stride = "" if result["stride"] is None else f", {count(result['stride'])} apart"
    return f"{result['definition']}, {count(result['windows'])} windows of {count(result['context'])} tokens{stride}"
