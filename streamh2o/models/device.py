"""Where to run and in which numbers: `--device auto` and `--dtype auto`."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from streamh2o.errors import UsageError, UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda", "mps")


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`: `auto` (a CUDA or ROCm GPU where there is one, else the CPU), `cpu`, `cuda`, `cuda:1`.

    Apple's `mps` is taken only when asked for by name.
    Raises UsageError for an unknown name, UserError where this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICES:
        raise UsageError(
            f"--device {name!r} is unknown; use auto, {', '.join(DEVICES)} or a numbered one such as cuda:0."
        )
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise UserError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs here; use --device cpu.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"--device {name}: PyTorch cannot use an Apple GPU here; use --device cpu.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format called `name`; `auto` is bfloat16 where `device` computes fast in it, else float32.

    Raises UsageError for an unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def fast_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 faster than float32.

    A GPU from Ampere on does. A CPU must have the instructions (AVX512-BF16 or AMX; elsewhere PyTorch emulates the
    format) and show it in a short trial: AVX512-BF16 alone doubles the speed of some processors and halves that of
    others.
    """
    if device.type == "cuda":
        if torch.version.hip:
            return torch.cuda.is_bf16_supported()
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"}) and _bfloat16_ratio() > 1.2


def _bfloat16_ratio() -> float:
    """How many times faster than float32 a bfloat16 product of matrices is on one core; takes about 50 milliseconds.

    The products last about a millisecond, so that the fastest of them ran undisturbed even on a busy machine.
    """
    fastest = {torch.float32: math.inf, torch.bfloat16: math.inf}
    matrices = {dtype: (torch.ones(128, 768, dtype=dtype), torch.ones(768, 768, dtype=dtype)) for dtype in fastest}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(20):
            for dtype, (matrix, weight) in matrices.items():
                start = time.perf_counter()
                torch.nn.functional.linear(matrix, weight)
                fastest[dtype] = min(fastest[dtype], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return fastest[torch.float32] / fastest[torch.bfloat16]


def cpu_flags() -> set[str]:
    """The bfloat16 instruction sets of this CPU: from PyTorch, or from Linux where PyTorch does not tell."""
    found = set()
    for flag, probe in (("avx512_bf16", "_is_avx512_bf16_supported"), ("amx_bf16", "_is_amx_tile_supported")):
        if getattr(torch.cpu, probe, bool)():
            found.add(flag)
    if found:
        return found
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()
