"""Checks of this machine, in seconds: versions, device and number format, memory, models, and whether chunks add up."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from streamh2o.errors import UserError

if TYPE_CHECKING:
    import torch

    from streamh2o.models.loaded import Loaded

_CHUNK, _SLOTS = 16, 24


@dataclass(frozen=True)
class Finding:
    """One line of the report. good: False where something is wrong, so that the command exits with 1."""

    what: str
    line: str
    good: bool = True


def examine(model: str, dtype: str, device: str, kernel: str, weights: str = "plain") -> Iterator[Finding]:
    """Every check in turn; one that fails does not keep the others from running."""
    yield from _each("versions", check_versions)
    yield from _each("threads", check_threads)
    yield from _each("kernel", partial(check_kernel, kernel, device))
    yield from _each("models", check_models)
    loaded: list[Loaded] = []
    yield from _each("model", lambda: _load(model, dtype, device, weights, loaded))
    for one in loaded:
        yield from _each("memory", partial(check_memory, one))
        yield from _each("losses", partial(check_losses, one))


def _each(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except UserError as error:
        yield Finding(what, str(error), good=False)
    except Exception as error:
        yield Finding(what, f"{type(error).__name__}: {' '.join(str(error).split())}", good=False)


def check_versions(package: str = "streamh2o") -> Iterator[Finding]:
    """The installed libraries against the ranges that `package` was tested with."""
    from packaging.requirements import Requirement

    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for text in importlib.metadata.requires(package) or ():
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(needed.name, f"is not installed; pip install '{needed}'", good=False)
            continue
        good = needed.specifier.contains(version, prereleases=True)
        yield Finding(needed.name, f"{version}, supported: {needed.specifier}", good)


def check_threads() -> Iterator[Finding]:
    """How many processor cores are used, of how many."""
    import os

    import torch

    yield Finding("threads", f"{torch.get_num_threads()}, of {os.cpu_count()} processors that the system shows")


def check_kernel(name: str, device: str) -> Iterator[Finding]:
    """How attention is computed from here on."""
    from streamh2o.kernels.select import select
    from streamh2o.models.device import choose_device

    said: list[str] = []
    place = choose_device(device)
    chosen = select(name, place, said.append).name
    if chosen == "compiled" and place.type == "cuda":
        import triton

        chosen += f" by Triton {triton.__version__}"
    yield Finding("kernel", "; ".join([chosen, *(line.removeprefix("kernel: ") for line in said)]))


def check_models() -> Iterator[Finding]:
    """Which models can be loaded without a download."""
    from streamh2o.models.find import list_models

    names = [one.name for one in list_models() if one.ready]
    yield Finding(
        "models", ", ".join(names) if names else "none; get one: streamh2o models get smollm2-135m", bool(names)
    )


def _load(model: str, dtype: str, device: str, weights: str, loaded: list[Loaded]) -> Iterator[Finding]:
    from streamh2o.models.load import load_model
    from streamh2o.terminal import size

    one = load_model(model, dtype=dtype, device=device, selftest=False, weights=weights)  # `check_losses` tells more
    loaded.append(one)
    yield Finding("device", f"{one.device}, {_why_device(device, one.device)}")
    number = str(one.dtype).removeprefix("torch.")
    yield Finding("dtype", f"{number}, {_why_dtype(dtype, one)}")
    facts = one.info()
    about = f"{facts['parameters'] / 1e6:,.0f} M parameters, cache and chunk up to {one.trained_positions:,} tokens"
    yield Finding("model", f"{model}: {facts['architecture']}, {about}")
    yield Finding("weights", f"{_weights(one)}, {size(facts['weight_bytes'])}")


def _weights(loaded: Loaded) -> str:
    """What the weights are in memory."""
    from collections import Counter

    from streamh2o.kernels.gguf_linear import gguf_modules

    if loaded.weights == "plain":
        return "plain"
    kinds = Counter(module.kind.name for module in gguf_modules(loaded.model))
    return "packed, " + " and ".join(f"{count} matrices of {kind}" for kind, count in kinds.items())


def _why_device(asked: str, device: torch.device) -> str:
    if asked != "auto":
        return "as asked for"
    return "a GPU that PyTorch can use" if device.type == "cuda" else "since PyTorch finds no GPU here"


def _why_dtype(asked: str, loaded: Loaded) -> str:
    from streamh2o.models.device import auto_dtype

    return "as asked for" if asked != "auto" else auto_dtype(loaded.device, loaded.weights).why


def check_memory(loaded: Loaded, cache: int = 1024, chunk: int = 256) -> Iterator[Finding]:
    """Whether the default cache fits beside the model."""
    from streamh2o.cache.memory_check import free_bytes, slot_bytes
    from streamh2o.terminal import size

    layers, heads, each = slot_bytes(loaded.model)
    cache = min(cache, loaded.trained_positions - chunk)
    needed, free = layers * heads * each * (cache + chunk), free_bytes(loaded.device)
    if free is None:
        yield Finding("memory", f"a cache of {cache} takes {size(needed)}; the system does not tell what is free")
    else:
        yield Finding("memory", f"{size(free)} free, a cache of {cache} takes {size(needed)}", needed <= free)


def check_losses(loaded: Loaded) -> Iterator[Finding]:
    """One by one, in chunks, and by plain `transformers`: the same losses. And a cache that evicts keeps its budget."""
    from streamh2o.models.self_test import TOLERANCE, streamed, text_ids, transformers_losses
    from streamh2o.policies import make_policy

    ids = text_ids(loaded, 96, _CHUNK)
    dense = transformers_losses(loaded.model, ids)
    policy = make_policy("streamingllm", cache=ids.shape[1])
    serial, chunked = (streamed(loaded, policy, ids, chunk)[0] for chunk in (1, _CHUNK))
    limit = TOLERANCE[str(loaded.dtype).removeprefix("torch.")]
    for name, other in (("token by token", serial), ("transformers' own attention", dense)):
        difference = float((chunked - other).abs().mean())
        line = (
            f"chunks of {_CHUNK} against {name}: {difference:.1e} nats apart in the mean, up to {limit:g} is rounding"
        )
        yield Finding("losses", line, difference <= limit)
    _, evictions, most = streamed(loaded, make_policy("streamh2o", cache=_SLOTS), ids, _CHUNK)
    good = most <= _SLOTS and (evictions > 0 or ids.shape[1] <= _SLOTS)
    yield Finding("cache", f"{evictions} evictions, at most {most} of {_SLOTS} slots held", good)
