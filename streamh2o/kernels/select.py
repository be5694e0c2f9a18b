"""Which compiled forms a stream computes with: selected for each stream by itself, never for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from streamh2o.errors import UsageError, UserError
from streamh2o.kernels import compiled
from streamh2o.kernels.build import load
from streamh2o.kernels.plain import attend, column_sums

KERNELS = ("auto", "torch", "compiled")
CPU = torch.device("cpu")
_WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # how close to plain torch's float32


@dataclass(frozen=True)
class Kernel:
    """What a stream computes with. types: the number formats of the compiled forms; none for plain torch.

    place: the type of device that these forms are for.
    """

    types: frozenset[torch.dtype] = frozenset()
    place: str = "cpu"

    @property
    def name(self) -> str:
        """`compiled` or `torch`."""
        return "compiled" if self.types else "torch"

    def takes(self, x: Tensor) -> bool:
        """Whether the forms for CPUs, such as `compiled.rotate`, are for tensors like `x`."""
        return x.dtype in self.types and x.device.type == "cpu" == self.place

    def takes_slots(self, buffer: Tensor) -> bool:
        """Whether `compiled.append`, `keep` and `highest` are for this buffer."""
        return bool(self.types) and buffer.device.type == "cpu" == self.place

    def takes_queries(self, query: Tensor) -> bool:
        """Whether `compiled.attend_and_sum` is for these queries [batch, heads, C, head_dim]."""
        if query.dtype in self.types and query.device.type == "cuda" == self.place:
            return query.shape[2] >= 16
        # In float32 plain torch is as fast with few queries.
        return self.takes(query) and query.shape[3] % 2 == 0 and (query.shape[2] >= 16 or query.dtype == torch.bfloat16)


TORCH = Kernel()

_lock = threading.Lock()
_found: dict[torch.device, Kernel | UserError] = {}  # what trying each device gave


def select(name: str = "auto", device: torch.device = CPU, tell: Callable[[str], None] = lambda _: None) -> Kernel:
    """The kernel called `name` for streams on `device`.

    auto: compiled where it can be built and gives what plain torch gives, else torch, with a word to `tell`. compiled:
    the same, but it must. torch: plain torch. The first time on a machine takes half a minute, to build it.
    Raises UsageError for another name, UserError where `compiled` cannot be had.
    """
    if name not in KERNELS:
        raise UsageError(f"--kernel is {name!r}; it must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}.")
    if name == "torch":
        return TORCH
    with _lock:
        if device not in _found:
            _found[device] = _try(device, tell)
            if name == "auto" and isinstance(_found[device], UserError):
                tell(f"kernel: plain torch, since {_found[device]}")
        found = _found[device]
    if isinstance(found, Kernel):
        return found
    if name == "compiled":
        raise found
    return TORCH


def _try(device: torch.device, tell: Callable[[str], None]) -> Kernel | UserError:
    try:
        if device.type == "cpu":
            load(tell)
            return Kernel(_cpu_types(), "cpu")
        return Kernel(_triton_types(device), device.type)
    except UserError as reason:
        return reason


def _agrees(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled attention gives in `dtype` what plain torch gives in float32."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 64, 64, generator=random) / 8
    keys, values = torch.randn(2, 1, 2, 200, 64, generator=random)
    weights = torch.rand(64, generator=random)
    expected, probabilities = attend(query, keys, values)
    expected_sums = column_sums(probabilities, weights, 32)
    query, keys, values = (tensor.to(device, dtype) for tensor in (query, keys, values))
    output, sums = compiled.attend_and_sum(query, keys, values, weights.to(device), 32)
    assert sums is not None
    good = torch.allclose(output.cpu().float(), expected, atol=_WITHIN[dtype])
    return good and torch.allclose(sums.cpu(), expected_sums, rtol=_WITHIN[dtype])


def _cpu_types() -> frozenset[torch.dtype]:
    """The number formats in which the compiled forms can be used on this CPU. Raises UserError where there are none."""
    agrees = {}
    for dtype in (torch.float32, torch.bfloat16):
        try:
            agrees[dtype] = _agrees(dtype, CPU)
        except RuntimeError:
            continue  # oneDNN has no such product for this processor
    if not agrees:
        raise UserError("this processor has not the products that it needs.")
    if not any(agrees.values()):
        raise UserError("it does not give here what plain torch gives; please report this.")
    return frozenset(dtype for dtype, good in agrees.items() if good)


def _triton_types(device: torch.device) -> frozenset[torch.dtype]:
    """All number formats, where Triton's attention can be used on this GPU. Raises UserError where one is not right."""
    if device.type != "cuda":
        raise UserError(f"there is no kernel for {device.type}.")
    if find_spec("triton") is None:
        raise UserError("there is no triton here, which PyTorch's builds for GPUs bring along.")
    for dtype in _WITHIN:
        try:
            good = _agrees(dtype, device)
        except Exception as error:  # whatever its compiler, the system's linker or the driver may say
            said = " ".join(str(error).split())[:200]
            raise UserError(f"Triton fails on this GPU ({type(error).__name__}: {said}).") from error
        if not good:
            raise UserError(f"Triton's {str(dtype).removeprefix('torch.')} is not plain torch's on this GPU.")
    return frozenset(_WITHIN)
