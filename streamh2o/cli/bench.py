"""`streamh2o bench`: speed against the machine's limit and against the ways people stream today."""

from __future__ import annotations

import json as codec
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import ModelOptions
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.cli.values import numbers
from streamh2o.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

app = make_app()


@app.command(cls=ManualCommand)
@expand_groups
def bench(
    machine: Annotated[ModelOptions, Without("device_map")],
    cache: Annotated[str, typer.Option(metavar="N,N,...", help="Cache sizes.")] = "512,1024,2048",
    policy: Annotated[str, typer.Option(metavar="NAME,...", help="Policies.")] = "streamh2o,h2o,streamingllm",
    chunk: opt.Chunk = 256,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Counted rounds; every contestant runs in each.")] = 5,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time llama-cpp-python and kvpress too, where they are installed.")
    ] = False,
    generate: Annotated[
        bool, typer.Option("--generate", help="Time model.generate instead, against the cache that grows.")
    ] = False,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Batches of --generate.")] = "1,4",
    prompt: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of its prompts.")] = "1024",
    new: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens it writes after each, at least 2.")] = "64",
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="2GB|500MB", help="Time the largest batches whose caches fit into so much, too."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE|-", help="All figures as JSON.")] = None,
) -> None:
    """Time the stream against the model's linear layers alone, which no stream can do without.

    All contestants run in turn in one process; the ratios are medians over the rounds, so that a busy machine slows all
    of them alike; with one thread on a CPU seconds are the processor's. The text is random tokens: speed does not
    depend on what they say.

    \b
    Examples:
      streamh2o bench
      streamh2o bench --cache 512 --chunk 512 --rounds 9 --json bench.json
      streamh2o bench --generate --batch 1,8 --prompt 2048 --new 128 --memory-limit 2GB

    With --generate each cache of ours has 20 % of the prompt's tokens as slots, and --cache and --policy do not count.
    """
    import torch

    from streamh2o.kernels.compiled import chosen
    from streamh2o.models.load import tell
    from streamh2o.runs.bench.stream_speed import bench as run
    from streamh2o.runs.outputs import check_outputs, write_whole
    from streamh2o.terminal import show

    caches = numbers(cache, "--cache")
    batches, prompts, news = (numbers(v, o) for v, o in ((batch, "--batch"), (prompt, "--prompt"), (new, "--new")))
    limit = None if memory_limit is None else _bytes(memory_limit)
    if min(news) < 2:
        raise UsageError(f"--new {new}: must be 2 or more, since the first token and those after it are timed apart.")
    check_outputs({"--json": json}, [machine.model])
    loaded = machine.load()
    if generate:
        from streamh2o.runs.bench.generate_speed import bench_generate

        result = bench_generate(
            loaded.model, batches, prompts, news, chunk=chunk, memory_limit=limit, rounds=rounds, tell=tell
        )
    else:
        vocabulary = loaded.model.config.get_text_config().vocab_size
        seeded = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (1, max(caches) + 8 * chunk), generator=seeded)
        result = run(
            loaded.model,
            ids,
            caches,
            policy.split(","),
            chunk,
            rounds,
            _peers(machine.model, loaded.model, ids, chunk) if peers else None,
        )
    result |= {"model": loaded.info(), "dtype": str(loaded.dtype).removeprefix("torch."), "device": str(loaded.device)}
    result |= {"threads": torch.get_num_threads(), "kernel": chosen()}
    if json is not None and str(json) == "-":
        print(codec.dumps(result))
        return
    if json is not None:
        write_whole(json, (codec.dumps(result, indent=1) + "\n").encode())
    for table in _generated(result) if generate else _streamed(result, min(caches)):
        show(table)
        print()
    how = f"{result['threads']} threads, {result['kernel']} kernel, chunks of {chunk}"
    packed = "packed weights, " if machine.weights == "packed" else ""
    print(f"{machine.model}, {packed}{result['dtype']} on {result['device']}, {how}")


def _peers(name: str, model: Any, ids: Any, chunk: int) -> Any:
    from streamh2o.models.load import tell
    from streamh2o.runs.bench.peers import contestants

    return contestants(name, model, ids, chunk, tell)


def _bytes(text: str) -> int:
    """`2GB`, `500MB` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(B|kB|KB|MB|GB|TB)?", text.strip())
    if match is None or not float(match.group(1)):
        raise UsageError(f"--memory-limit {text}: write a size such as 2GB or 500MB.")
    return int(float(match.group(1)) * 1000 ** ("B", "KB", "MB", "GB", "TB").index((match.group(2) or "B").upper()))


def _streamed(result: dict[str, Any], smallest: int) -> list[RenderableType]:
    from streamh2o.terminal import count, decimal, make_table

    runs = [(r["name"], count(round(r["tokens_per_second"])), decimal(r["of_limit"])) for r in result["runs"]]
    shares = [(s["name"], decimal(s["share"], 3)) for s in result["stages"]]
    gains = [(g["policy"], decimal(g["ratio"], 1)) for g in result["evict_token"]]
    return [
        make_table(("", "tokens/s", "of limit"), runs),
        make_table((f"stages of {result['stages_of']}", "x linear layers"), shares),
        make_table((f"--evict token, cache {smallest}", "x --chunk 1"), gains),
    ]


def _generated(result: dict[str, Any]) -> list[RenderableType]:
    from streamh2o.terminal import count, decimal, make_table, size

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
