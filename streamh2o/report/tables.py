"""Results as aligned text, and numbers as people write them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from streamh2o.terminal_safe import visible


def count(number: int | None) -> str:
    """1234567 as 1,234,567."""
    return "-" if number is None else f"{number:,}"


def decimal(number: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point, or as 2.786e+26 where that would be a long one; "-" for None."""
    if number is None:
        return "-"
    return f"{number:,.{digits}f}" if abs(number) < 1e9 else f"{number:.3e}"


def size(number: int | None) -> str:
    """Bytes in the largest unit that leaves a number of at least one, 1 kB being 1,000 bytes."""
    if number is None:
        return "-"
    if number < 1000:
        return f"{number} B"
    scaled = float(number)
    for unit in ("kB", "MB", "GB", "TB"):
        scaled /= 1000
        if scaled < 999.95 or unit == "TB":
            break
    return f"{scaled:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def width(text: str) -> int:
    """Columns that `text` takes in a terminal."""
    columns = 0
    for character in text:
        if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
            continue
        columns += 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
    return columns


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side: the first one left-aligned, the others, taken to be numbers, right-aligned."""
    cells = [[visible(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(width(row[column]) for row in cells) for column in range(len(headers))]
    lines = []
    for row in cells:
        padded = [
            cell + " " * (space - width(cell)) if column == 0 else " " * (space - width(cell)) + cell
            for column, (cell, space) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("─" * space for space in widths))
    return "\n".join(lines)


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Results of `run_perplexity` for people: a list of facts for one input, a row each for several."""
    return _facts(results[0]) if len(results) == 1 else _rows(results)


def _facts(result: dict[str, Any]) -> str:
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
        ("model", f"{visible(result['model']['name'])}, {result['dtype']} on {result['device']}"),
    ]
    lines = [visible(result["input"]["name"]) + _state(result)]
    lines += [f"  {name:<14} {value}" for name, value in facts]
    return "\n".join(lines)


def _rows(results: Sequence[dict[str, Any]]) -> str:
    headers = ("input", "tokens", "ppl", "ppl/word", "bits/byte", "tokens/s", "evictions", "keys+values")
    rows = [
        (
            result["input"]["name"] + _state(result),
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
    below = f"{last['policy']}, {count(last['cache'])} slots; {visible(last['model']['name'])}, {last['dtype']}"
    if "batch" in last:
        below += f", {count(last['batch'])} inputs at a time"
    return table(headers, rows) + f"\n{below}, peak memory {size(last['peak_rss_bytes'])}"


def _state(result: dict[str, Any]) -> str:
    return "" if result["complete"] else " (incomplete)"
