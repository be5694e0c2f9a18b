"""The tables of `streamh2o bench`, made of the plain numbers that `runs/bench/` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamh2o.terminal import count, decimal, make_table, size

if TYPE_CHECKING:
    from rich.console import RenderableType


def stream_tables(result: dict[str, Any]) -> list[RenderableType]:
    """Of `stream_speed.bench`."""
    runs = [(r["name"], count(round(r["tokens_per_second"])), decimal(r["of_limit"])) for r in result["runs"]]
    shares = [(s["name"], decimal(s["share"], 3)) for s in result["stages"]]
    gains = [(g["policy"], decimal(g["ratio"], 1)) for g in result["evict_token"]]
    engine = result["engine"]
    return [
        make_table(("", "tokens/s", "of limit"), runs),
        make_table((f"stages of {result['stages_of']}", "x linear layers"), shares),
        make_table((f"--evict token, cache {result['small']}", "x --chunk 1"), gains),
        f"the CPU engine, {engine['of']}: {decimal(engine['ratio'])} times as fast with it as without",
    ]


def generate_tables(result: dict[str, Any]) -> list[RenderableType]:
    """Of `generate_speed.bench_generate`."""
    tables: list[RenderableType] = []
    for case in result["cases"]:
        title = f"prompt {count(case['prompt'])}, new {count(case['new'])}"
        if case["largest_batch"]:
            title += f", at most {size(result['memory_limit'])}"
        rows = [
            (
                row["name"] if row["slots"] is None else f"{row['name']}, {count(row['slots'])} slots",
                count(row["batch"]),
                size(row["cache_bytes"]),
                decimal(row["tokens_per_second"], 1),
                decimal(row["times_as_fast"]),
                decimal(row["first_ratio"]),
                decimal(row["step_ratio"]),
            )
            for row in case["rows"]
        ]
        tables.append(make_table((title, "batch", "cache", "tokens/s", "x", "x first", "x step"), rows))
    return [*tables, "x: times as fast as transformers, in all, until the first token, and for each further one"]


def shared_tables(result: dict[str, Any]) -> list[RenderableType]:
    """Of `shared.bench_shared`."""
    names = {
        "alone": "alone",
        "busy": "beside one busy core",
        "pair": "two side by side, together",
        "unwatched": "alone, without the watch",
    }
    speeds = [(names[name], count(round(speed))) for name, speed in result["tokens_per_second"].items()]
    ratios = [(each["name"], decimal(each["ratio"]), decimal(each["wanted"])) for each in result["ratios"]]
    return [make_table(("", "tokens/s"), speeds), make_table(("", "ratio", "wanted"), ratios)]
