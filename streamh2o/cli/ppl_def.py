"""Which options of `streamh2o ppl` do not go with `--ppl-def hf|llamacpp|lmeval`."""

from __future__ import annotations

import typer

from streamh2o.errors import UsageError

_OF_STREAMS = (
    "policy",
    "cache",
    "sinks",
    "recent",
    "hitters",
    "far",
    "decay",
    "positions",
    "per_head",
    "chunk",
    "batch",
    "evict",
    "kv_bits",
    "device_map",
)
_NOT_HERE = (*_OF_STREAMS, "log", "plot", "checkpoint", "checkpoint_every", "resume")


def refuse_stream_options(ctx: typer.Context, definition: str) -> None:
    """Raise UsageError where an option was given that only a stream has."""
    refused = [*_NOT_HERE, "bos"] if definition != "hf" else _NOT_HERE
    for name in refused:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} belongs to --ppl-def stream; --ppl-def {definition} has none.")
