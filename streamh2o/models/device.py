"""Where to run and in which numbers: `--device auto` and `--dtype auto`."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class AutoDtype:
    """What `--dtype auto` takes on one kind of processor. why: ends the sentence "bfloat16, ..."."""

    dtype: torch.dtype
    why: str


_NOT_MEASURED = AutoDtype(torch.float32, "bfloat16 was not measured on such a device")
_GPU = AutoDtype(torch.bfloat16, "by this GPU's data sheet at least twice as fast as float32")

# By the kind of processor (`processor_kind`) and by how the weights lie: how many times as fast bfloat16 is as float32
# when it reads chunks of 256 tokens, and in decode steps. `python benchmarks/dtype_ratio.py` measured the rows of CPUs
# with SmolLM2-135M on one processor with AMX; the row without AMX with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, the row
# without both with ONEDNN_MAX_CPU_ISA=AVX512_CORE. Reading decides, since a run reads far more than it writes. With a
# model of 2.9B parameters in blocks on AMX a text was generated 2.8 times as fast (26.5 against 9.4 tokens/s).
AUTO: dict[tuple[str, str], AutoDtype] = {
    # reading 4.12, decoding 1.60
    ("amx", "plain"): AutoDtype(torch.bfloat16, "measured 4.1 times as fast as float32 with AMX"),
    # reading 3.29, decoding 1.01
    ("amx", "packed"): AutoDtype(torch.bfloat16, "measured 3.3 times as fast as float32 with AMX"),
    # reading 0.76, decoding 1.56
    ("avx512_bf16", "plain"): AutoDtype(torch.float32, "AVX512-BF16 without AMX reads slower in bfloat16"),
    # reading 0.69, decoding 1.03
    ("avx512_bf16", "packed"): AutoDtype(torch.float32, "AVX512-BF16 without AMX reads slower in bfloat16"),
    # reading 0.25, decoding 0.88
    ("cpu", "plain"): AutoDtype(torch.float32, "this processor has no instructions for bfloat16"),
    # reading 0.20, decoding 0.06
    ("cpu", "packed"): AutoDtype(torch.float32, "this processor has no instructions for bfloat16"),
    # Not measured. Tensor cores from compute capability 8.0 on: 312 TFLOP/s in bfloat16, 19.5 in float32 (A100).
    ("cuda_bf16", "plain"): _GPU,
    # Not measured. Matrix cores: 383 TFLOP/s in bfloat16, 48 in float32 (MI250X); 123 and 61 (RX 7900 XTX).
    ("hip_bf16", "plain"): _GPU,
    ("cuda", "plain"): AutoDtype(torch.float32, "this GPU has no units for bfloat16"),
    ("hip", "plain"): AutoDtype(torch.float32, "this GPU has no units for bfloat16"),
    ("mps", "plain"): _NOT_MEASURED,
}
_HIP_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")  # CDNA 2 and later, RDNA 3 and later


def choose_dtype(name: str, device: torch.device, weights: str = "plain") -> torch.dtype:
    """The number format called `name`; `auto` is what the table `AUTO` has for this device and these weights.

    weights: plain, or packed where the matrices stay the blocks of a GGUF file. Nothing is timed: the same machine and
    the same weights always give the same format. Raises UsageError for an unknown name.
    """
    if name == "auto":
        return auto_dtype(device, weights).dtype
    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def auto_dtype(device: torch.device, weights: str = "plain") -> AutoDtype:
    """What `auto` takes on `device`, and why."""
    return AUTO.get((processor_kind(device), weights), _NOT_MEASURED)


def processor_kind(device: torch.device) -> str:
    """The device's name in the table `AUTO`: by its instructions or its generation, never by its speed."""
    if device.type == "cuda" and torch.version.hip:
        name = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
        return "hip_bf16" if name.startswith(_HIP_BF16) else "hip"
    if device.type == "cuda":
        return "cuda_bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "cuda"
    if device.type != "cpu":
        return device.type
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return "cpu"
    flags = cpu_flags()
    return "amx" if "amx_bf16" in flags else "avx512_bf16" if "avx512_bf16" in flags else "cpu"


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
