"""`streamh2o bench`: speed against the machine's limit and against the ways people stream today."""

from __future__ import annotations

import json as codec
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import ModelOptions
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.cli.results import give_results
from streamh2o.cli.values import numbers
from streamh2o.errors import UsageError

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

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
    shared: Annotated[
        bool, typer.Option("--shared", help="Time the stream beside a busy core and beside another stream instead.")
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
      streamh2o bench --shared --cache 512 --policy streamh2o --dtype float32

    With --generate each cache of ours has 20 % of the prompt's tokens as slots, and --cache and --policy do not count.
    --shared takes the first of --cache and of --policy.
    """
    from streamh2o.models.load import tell
    from streamh2o.report import bench_tables
    from streamh2o.runs.outputs import check_outputs, is_stdout
    from streamh2o.terminal import show

    if generate and shared:
        raise UsageError("--generate and --shared are two benchmarks; run one after the other.")
    caches, policies = numbers(cache, "--cache"), policy.split(",")
    batches, prompts, news = (numbers(v, o) for v, o in ((batch, "--batch"), (prompt, "--prompt"), (new, "--new")))
    limit = None if memory_limit is None else _bytes(memory_limit)
    if min(news) < 2:
        raise UsageError(f"--new {new}: must be 2 or more, since the first token and those after it are timed apart.")
    check_outputs({"--json": json}, [machine.model])
    if shared:
        result = _shared(machine, policies[0], caches[0], chunk, rounds)
        tables = bench_tables.shared_tables(result)
    else:
        loaded = machine.load()
        if generate:
            from streamh2o.runs.bench.generate_speed import bench_generate

            result = bench_generate(
                loaded.model, batches, prompts, news, chunk=chunk, memory_limit=limit, rounds=rounds, tell=tell
            )
            tables = bench_tables.generate_tables(result)
        else:
            result = _streamed(machine.model, loaded, caches, policies, chunk, rounds, peers)
            tables = bench_tables.stream_tables(result)
        result |= _about(loaded)

    def print_all() -> None:
        for table in tables:
            show(table)
            print()
        how = f"{result['threads']} threads, {result['kernel']} kernel, chunks of {chunk}"
        packed = "packed weights, " if machine.weights == "packed" else ""
        print(f"{machine.model}, {packed}{result['dtype']} on {result['device']}, {how}")

    give_results(json, codec.dumps(result, indent=None if is_stdout(json) else 1) + "\n", print_all)


def _about(loaded: Loaded) -> dict[str, Any]:
    """What was timed, and on what."""
    import torch

    about = {"model": loaded.info(), "dtype": str(loaded.dtype).removeprefix("torch."), "device": str(loaded.device)}
    return {**about, "threads": torch.get_num_threads(), "kernel": loaded.kernel.name}


def _shared(machine: ModelOptions, policy: str, cache: int, chunk: int, rounds: int) -> dict[str, Any]:
    from streamh2o.models.device import choose_device
    from streamh2o.models.load import tell
    from streamh2o.runs.bench.shared import Work, bench_shared

    if choose_device(machine.device).type != "cpu":
        raise UsageError("--shared times the threads of a processor; add --device cpu.")
    how = {field.name: getattr(machine, field.name) for field in fields(machine) if field.name != "device_map"}
    return bench_shared(Work(policy=policy, cache=cache, chunk=chunk, **how), rounds, tell=tell)


def _streamed(
    name: str, loaded: Loaded, caches: list[int], policies: list[str], chunk: int, rounds: int, peers: bool
) -> dict[str, Any]:
    from streamh2o.runs.bench.stream_speed import bench, random_ids

    ids = random_ids(loaded.model, max(caches) + 8 * chunk)
    others = _peers(name, loaded.model, ids, chunk) if peers else None
    return bench(loaded.model, ids, caches, policies, chunk, rounds, others, loaded.kernel)


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
