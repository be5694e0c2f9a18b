"""cpp/*.cpp as a library of operators of torch, compiled for this machine once and kept."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from streamh2o.errors import UserError
from streamh2o.machine import cache_home

SOURCES = sorted((Path(__file__).parent / "cpp").glob("*.cpp"))
HEADERS = sorted((Path(__file__).parent / "cpp").glob("*.h"))


def load(tell: Callable[[str], None]) -> None:
    """Register the operators with torch. Raises UserError where they cannot be built."""
    if hasattr(torch.ops.streamh2o, "attend_and_sum"):
        return
    library = cache_home() / "kernels" / f"{_fingerprint()}.so"
    if not library.exists():
        tell("kernel: compiling it for this machine, once, in about 30 seconds (--kernel torch does without)")
        _build(library)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise UserError(f"{library} can't be loaded ({error}); remove it and it is built again.") from None


def _fingerprint() -> str:
    """Of all that the built file depends on: source, torch, compiler and its options, and the processor."""
    processor = re.findall(r"^(?:model name|flags)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:2]
    options = [part.replace(str(HEADERS[0].parent), "") for part in [*_compiler(), *_libraries()]]
    parts = [*(source.read_text() for source in [*HEADERS, *SOURCES]), torch.__version__, *options, *processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> list[str]:
    """How to compile, less sources and output. Raises UserError where this machine is not one for it."""
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
        *("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-w"),
        *(f"-DCPU_CAPABILITY={vectors}", f"-DCPU_CAPABILITY_{vectors}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")),
    ]


def _libraries() -> list[str]:
    """What the compiled sources are linked with."""
    return ["-shared", "-fopenmp", f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]


def _build(library: Path) -> None:
    """Compile beside `library` and rename, so that several processes may do so at once."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            objects = [str(Path(folder) / f"{source.stem}.o") for source in SOURCES]
            command = _compiler()
            with ThreadPoolExecutor(os.cpu_count()) as several:
                compiling = [
                    [*command, "-c", str(source), "-o", out] for source, out in zip(SOURCES, objects, strict=True)
                ]
                for source, error in zip(SOURCES, several.map(_complaint, compiling), strict=True):
                    if error is not None:
                        raise UserError(f"the compiler failed on {source.name}: {error}")
            if error := _complaint([command[0], *objects, *_libraries(), "-o", str(made)]):
                raise UserError(f"the compiler failed to link it: {error}")
            made.replace(library)
    except OSError as error:
        raise UserError(f"it can't be built in {library.parent}: {error.strerror or error}.") from None


def _complaint(command: list[str]) -> str | None:
    """Run a compiler's command; its first error, None where there was none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
    return lines[0][:200]
