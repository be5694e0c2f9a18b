"""A model's name to a loaded model and tokenizer."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.cache.families import require_known, require_supported, trained_positions
from streamh2o.errors import UsageError, UserError
from streamh2o.models.find import DEFAULT_MODEL, gguf_file, model_folder
from streamh2o.models.gguf.unpacked import readable_errors
from streamh2o.models.loaded import Loaded
from streamh2o.versions import leading_numbers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

WEIGHTS = ("plain", "packed")
TRANSFORMERS = ("5.0", "6")  # from the first, below the second; pyproject.toml says the same
_SAMPLES = 256  # blocks of a weight file that its fingerprint reads
_BLOCK = 4096


def load_model(
    name: str = DEFAULT_MODEL,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    selftest: bool = True,
    device_map: str | dict[str, Any] | None = None,
    weights: str = "plain",
    kernel: str = "auto",
) -> Loaded:
    """Load the model called `name`: a named one (smollm2-135m), a Hugging Face folder, a `.gguf` file or a hub id.

    dtype: auto (by processor and weights: `device.AUTO`), float32, bfloat16 or float16. device: auto, cpu, cuda, cuda:N
    or mps. Code that a model brings along runs only with `trust_remote_code`.
    selftest: try the model on 32 tokens before it is given out. device_map: spread the layers over all devices, as
    `accelerate` does it: auto, or what goes where. weights: plain, or packed, which keeps the matrices of a GGUF file
    in its blocks, on a CPU. kernel: auto, compiled or torch.
    Raises UserError where the model is not there, not supported or damaged; UsageError for an unknown dtype or device.
    """
    import torch
    import transformers

    from streamh2o.kernels.select import select
    from streamh2o.models.device import choose_device, choose_dtype
    from streamh2o.models.self_test import require_same

    check_transformers(transformers.__version__)
    place = choose_device(device)
    number = choose_dtype(dtype, place, weights)
    computes = select(kernel, place, tell)
    path = None if weights == "plain" else _require_packable(name, weights, place, device_map is not None)
    spread = {} if device_map is None else {"device_map": _require_spreadable(device_map, device)}
    with quiet_transformers():
        folder = model_folder(name, trust_remote_code=trust_remote_code, tell=tell)
        how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        config = _config(name, folder, how)
        if path is None:
            model = _plain_model(name, folder, config, number, {**spread, **how})
        else:
            from streamh2o.models.gguf.packed import load_packed

            model = load_packed(path, config, number, tell, computes)
        tokenizer = _tokenizer(name, folder, how)
    model.eval().requires_grad_(False)
    if spread:
        place = model.device
        if place.type == "meta":
            raise UserError(f"{name} does not fit: not even its token embedding has a device; use a smaller model.")
    try:
        if not spread:
            model.to(place)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{name} does not fit on {place}; use a smaller model, --device-map auto or --device cpu."
        ) from error
    made = Loaded(
        name, model, tokenizer, number, place, trained_positions(config), fingerprint(folder), weights, kernel=computes
    )
    if selftest:
        require_same(made)
    return made


def _plain_model(name: str, folder: Path, config: Any, dtype: torch.dtype, how: dict[str, Any]) -> Any:
    """The model in `folder`, as `transformers` loads it."""
    import transformers

    with readable_errors(f"The model {name}"):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **how
        )
        model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"{name} lacks {len(missing)} of its weights ({missing[0]} for one); get it again.")
    return model


def _require_packable(name: str, weights: str, device: torch.device, spread: bool) -> Path:
    """The GGUF file of the model called `name`. Raises UsageError where its blocks cannot be kept."""
    if weights != "packed":
        raise UsageError(f"--weights {weights}: must be {' or '.join(WEIGHTS)}.")
    if spread:
        raise UsageError("--weights packed is for one CPU, and --device-map spreads the model; leave one out.")
    if device.type != "cpu":
        raise UsageError(
            f"--weights packed is for a CPU, and the device is {device}; add --device cpu or leave it out."
        )
    path = gguf_file(name)
    if path is None:
        raise UsageError(f"--weights packed is for GGUF files, and {name} is none; leave it out.")
    return path


def _require_spreadable(device_map: str | dict[str, Any], device: str) -> str | dict[str, Any]:
    if device != "auto":
        raise UsageError(f"--device {device} puts the model on one device, and --device-map spreads it; leave one out.")
    if isinstance(device_map, str) and device_map != "auto":
        raise UsageError(f"--device-map {device_map}: must be auto.")
    return device_map


def _config(name: str, folder: Path, how: dict[str, Any]) -> Any:
    """The model's configuration, once it is known that its architecture is supported."""
    import transformers

    with readable_errors(f"The configuration of {name}"):
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "unknown")
        require_known(kind, name)  # before transformers sees it: it has no sentence for one it does not know
        config = transformers.AutoConfig.from_pretrained(str(folder), **how)
    require_supported(config, name)
    return config


def _tokenizer(name: str, folder: Path, how: dict[str, Any]) -> PreTrainedTokenizerBase:
    import transformers

    with readable_errors(f"The tokenizer of {name}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **how)
    # A stream is longer than any model's window by design; the warning about it would only frighten.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits for what lies in `folder`: whole small files, and evenly spaced blocks of the weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        if file.suffix == ".safetensors":
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as weights:
                for step in range(_SAMPLES):
                    weights.seek(file.stat().st_size * step // _SAMPLES)
                    digest.update(weights.read(_BLOCK))
        elif file.name in ("config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def check_transformers(version: str) -> None:
    """Raise UserError where the installed `transformers` is outside the range this package was tested with."""
    first, end = TRANSFORMERS
    if not leading_numbers(first) <= leading_numbers(version) < leading_numbers(end):
        raise UserError(
            f"transformers {version} is installed, and streamh2o needs {first} or later, but below {end}; "
            f"install it with: pip install 'transformers>={first},<{end}'"
        )


def tell(line: str) -> None:
    """Progress goes to stderr, so that stdout carries results only."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings of `transformers` while the block runs; its settings come back afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
