"""`streamh2o bench`: speed against the machine's limit and against the ways people stream today."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app

app = make_app()


@app.command(cls=ManualCommand)
def bench(
    model: opt.Model = "smollm2-135m",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    kernel: opt.Kernel = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    cache: Annotated[str, typer.Option(metavar="N,N,...", help="Cache sizes.")] = "512,1024,2048",
    policy: Annotated[str, typer.Option(metavar="NAME,...", help="Policies.")] = "streamh2o,h2o,streamingllm",
    chunk: opt.Chunk = 256,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Counted rounds; every contestant runs in each.")] = 5,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE|-", help="All figures as JSON.")] = None,
) -> None:
    """Time the stream against the model's linear layers alone, which no stream can do without.

    All contestants run in turn in one process; the ratios are medians over the rounds, so that a busy machine slows all
    of them alike. The text is random tokens: speed does not depend on what they say.

    \b
    Examples:
      streamh2o bench
      streamh2o bench --cache 512 --chunk 512 --rounds 9 --json bench.json
    """
    import json as codec

    import torch

    from streamh2o.bench import bench as run
    from streamh2o.cli import processor
    from streamh2o.errors import UsageError
    from streamh2o.kernel import chosen
    from streamh2o.models import load_model
    from streamh2o.outputs import check_outputs, write_whole
    from streamh2o.report.tables import count, decimal, table

    try:
        caches = [int(part) for part in cache.split(",")]
    except ValueError:
        raise UsageError(f"--cache {cache}: must be whole numbers with commas between them.") from None
    check_outputs({"--json": json}, [model])
    processor.use(threads, kernel, device)
    loaded = load_model(model, dtype, device, trust_remote_code)
    length = max(caches) + 8 * chunk
    vocabulary = loaded.model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    result = run(loaded.model, ids, caches, policy.split(","), chunk, rounds)
    result |= {"model": loaded.info(), "dtype": str(loaded.dtype).removeprefix("torch."), "device": str(loaded.device)}
    result |= {"threads": torch.get_num_threads(), "kernel": chosen()}
    if json is not None and str(json) == "-":
        print(codec.dumps(result))
        return
    if json is not None:
        write_whole(json, (codec.dumps(result, indent=1) + "\n").encode())
    rows = [(r["name"], count(round(r["tokens_per_second"])), decimal(r["of_limit"])) for r in result["runs"]]
    print(table(("", "tokens/s", "of limit"), rows))
    print()
    shares = [(s["name"], decimal(s["share"], 3)) for s in result["stages"]]
    print(table((f"stages of {result['stages_of']}", "x linear layers"), shares))
    print()
    gains = [(g["policy"], decimal(g["ratio"], 1)) for g in result["evict_token"]]
    print(table((f"--evict token, cache {min(caches)}", "x --chunk 1"), gains))
    how = f"{result['threads']} threads, {result['kernel']} kernel, chunks of {chunk}"
    print(f"\n{model}, {result['dtype']} on {result['device']}, {how}")
