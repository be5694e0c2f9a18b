"""The compiled path on CPUs: built from kernel.cpp on this machine, once, and chosen at the start of a run."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from streamh2o.errors import UsageError, UserError
from streamh2o.gguf_cache import cache_home

KERNELS = ("auto", "torch", "compiled")
SOURCE = Path(__file__).with_name("kernel.cpp")

_types: frozenset[torch.dtype] = frozenset()  # what the kernel that is in use computes; empty: it is not


def choose(name: str, tell: Callable[[str], None] = lambda _: None) -> str:
    """Let all streams of this process compute as `name` says from now on; returns what that came to.

    auto: compiled where it can be built and gives what plain torch gives, else torch, with a word to `tell`. compiled:
    the same, but it must. torch: plain torch. Raises UsageError for another name, UserError where `compiled` cannot be.
    """
    global _types
    if name not in KERNELS:
        raise UsageError(f"--kernel is {name!r}; it must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}.")
    _types = frozenset()
    if name != "torch":
        try:
            _load(tell)
            _types = _sound_types()
        except UserError as reason:
            if name == "compiled":
                raise
            tell(f"kernel: plain torch, since {reason}")
    return chosen()


def chosen() -> str:
    """`compiled` or `torch`: what streams of this process use, where they can."""
    return "compiled" if _types else "torch"


def takes(x: Tensor) -> bool:
    """Whether the kernel is in use and computes with tensors such as `x`."""
    return x.dtype in _types and x.device.type == "cpu"


def takes_queries(query: Tensor) -> bool:
    """Whether `attend_and_sum` is for these queries [batch, heads, C, head_dim]."""
    if not takes(query) or query.shape[3] % 2:
        return False
    return query.shape[2] >= 16 or query.dtype == torch.bfloat16  # else plain torch is as fast


def attend_and_sum(
    query: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, far: int
) -> tuple[Tensor, Tensor | None]:
    """See `attention.attend_and_sum`."""
    output, sums = torch.ops.streamh2o.attend_and_sum(query, keys, values, weights, far)
    return output, None if weights is None else sums


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, scale: float, interleaved: bool) -> Tensor:
    """A rotated copy of x [batch, heads, n, head_dim] at `positions` [batch or 1, heads or 1, n], times `scale`."""
    rotated: Tensor = torch.ops.streamh2o.rotate(x, positions, cos, sin, scale, interleaved)
    return rotated


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy [rows] of logits [rows, vocabulary] in nats, float32."""
    result: Tensor = torch.ops.streamh2o.losses(logits, targets)
    return result


def _load(tell: Callable[[str], None]) -> None:
    """Register the operators with torch. Raises UserError where they cannot be built."""
    if hasattr(torch.ops.streamh2o, "attend_and_sum"):
        return
    library = cache_home() / "kernels" / f"{_fingerprint()}.so"
    if not library.exists():
        tell("kernel: compiling it for this machine, once, in about 20 seconds (--kernel torch does without)")
        _build(library)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise UserError(f"{library} can't be loaded ({error}); remove it and it is built again.") from None


def _fingerprint() -> str:
    """Of all that the built file depends on: source, torch, compiler and its options, and the processor."""
    processor = re.findall(r"^(?:model name|flags)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:2]
    parts = [SOURCE.read_text(), torch.__version__, *_command(), *processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _command() -> list[str]:
    """How to compile, less the output. Raises UserError where this machine is not one for it."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX") or platform.system() != "Linux":
        raise UserError(f"it is for Linux with AVX2 or AVX-512, and this is {platform.system()} ({capability}).")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UserError("there is no C++ compiler (g++) here.")
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    vectors = "AVX512" if "AVX512" in capability else "AVX2"
    return [
        compiler,
        *("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-w"),
        *(f"-DCPU_CAPABILITY={vectors}", f"-DCPU_CAPABILITY_{vectors}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")),
        str(SOURCE),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"),
    ]


def _build(library: Path) -> None:
    """Compile beside `library` and rename, so that several processes may do so at once."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            done = subprocess.run([*_command(), "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
                raise UserError(f"the compiler failed on {SOURCE.name}: {lines[0][:200]}")
            made.replace(library)
    except OSError as error:
        raise UserError(f"it can't be built in {library.parent}: {error.strerror or error}.") from None


def _sound_types() -> frozenset[torch.dtype]:
    """The number formats in which the kernel gives what plain torch gives. Raises UserError where there are none."""
    from streamh2o.attention import attend, column_sums

    torch_seed = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 64, 64, generator=torch_seed) / 8
    keys, values = torch.randn(2, 1, 2, 200, 64, generator=torch_seed)
    weights = torch.rand(64, generator=torch_seed)
    expected, probabilities = attend(query, keys, values)
    expected_sums = column_sums(probabilities, weights, 32)
    sound = set()
    for dtype, within in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        try:
            output, sums = attend_and_sum(query.to(dtype), keys.to(dtype), values.to(dtype), weights, 32)
        except RuntimeError:
            continue  # oneDNN has no such product for this processor
        assert sums is not None
        if torch.allclose(output.float(), expected, atol=within) and torch.allclose(sums, expected_sums, rtol=within):
            sound.add(dtype)
    if not sound:
        raise UserError("this processor has not the products that it needs.")
    return frozenset(sound)
