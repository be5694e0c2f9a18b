import errno
import json
import os
import stat

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.saving.folder import CheckpointFolder
from tests.mutate import mutate

TENSORS = {"keys": torch.arange(24.0).view(2, 3, 4).to(torch.bfloat16), "index": torch.arange(5)}


def save(folder, *names):
    with CheckpointFolder(folder) as checkpoints:
        for name in names:
            checkpoints.save({"name": name, "sum": 0.1 + 0.2}, TENSORS)


def newest(folder):
    """The newest sound checkpoint, and what was said."""
    said = []
    with CheckpointFolder(folder) as checkpoints:
        return checkpoints.newest(said.append), said


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    save(tmp_path / "a" / "b", "one")
    checkpoint, said = newest(tmp_path / "a" / "b")
    assert (checkpoint.body["name"], checkpoint.body["sum"], said) == ("one", 0.1 + 0.2, [])
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors[name], tensor)


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    assert newest(tmp_path) == (None, [])
    with CheckpointFolder(tmp_path) as checkpoints:
        assert checkpoints.empty
        checkpoints.save({}, {})
        assert not checkpoints.empty
    assert newest(tmp_path)[0].tensors == {}


def test_two_checkpoints_are_kept(tmp_path):
    save(tmp_path, "one", "two", "three", "four")
    expected = [f"checkpoint-{number}.{kind}" for number in (3, 4) for kind in ("json", "safetensors")]
    assert files(tmp_path) == expected
    assert newest(tmp_path)[0].body["name"] == "four"


def test_folder_and_files_are_private_and_no_pickle(tmp_path):
    before = os.umask(0)
    try:
        save(tmp_path / "new", "one")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    for path in (tmp_path / "new").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.name == "lock" or path.suffix in (".json", ".safetensors")


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "a bit flipped", "removed", "grown"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_it_is_said(tmp_path, kind, damage):
    save(tmp_path, "one", "two")
    path = tmp_path / f"checkpoint-2.{kind}"
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        path.write_bytes(
            {"cut": data[:middle], "emptied": b"", "a bit flipped": flipped, "grown": data + b"\0"}[damage]
        )
    checkpoint, said = newest(tmp_path)
    assert checkpoint.body["name"] == "one"
    if (kind, damage) == ("json", "removed"):  # its tensors alone are no checkpoint
        assert said == []
    else:
        (sentence,) = said
        assert "checkpoint-2 is damaged" in sentence
        assert "checkpoint-1" in sentence


def test_damaged_checkpoints_alone_are_an_error_and_are_not_overwritten(tmp_path):
    save(tmp_path, "one")
    (tmp_path / "checkpoint-1.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint-1 is damaged .*another folder"):
        newest(tmp_path)
    with CheckpointFolder(tmp_path) as checkpoints:
        assert not checkpoints.empty


def test_of_two_that_are_kept_none_is_known_to_be_damaged(tmp_path):
    save(tmp_path, "one", "two")
    (tmp_path / "checkpoint-2.json").write_bytes(b"{")
    with CheckpointFolder(tmp_path) as checkpoints:
        assert checkpoints.newest(lambda said: None).body["name"] == "one"
        checkpoints.save({"name": "three"}, TENSORS)
    assert [name for name in files(tmp_path) if "json" in name] == ["checkpoint-1.json", "checkpoint-3.json"]
    assert newest(tmp_path)[0].body["name"] == "three"


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    save(tmp_path, "one")
    (tmp_path / ".unfinished-abc").write_bytes(b"half")
    assert newest(tmp_path)[0].body["name"] == "one"
    assert not (tmp_path / ".unfinished-abc").exists()


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_failed_write_leaves_the_older_checkpoints_and_no_rubbish(tmp_path, monkeypatch, kind):
    save(tmp_path, "one", "two")
    before = files(tmp_path)
    replace = os.replace

    def full(source, target):
        if str(target).endswith(kind):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="no space left"):
        save(tmp_path, "three")
    monkeypatch.undo()
    assert [name for name in files(tmp_path) if name.endswith("json")] == [n for n in before if n.endswith("json")]
    assert not list(tmp_path.glob(".*"))
    assert newest(tmp_path)[0].body["name"] == "two"


def test_one_run_at_a_time_has_the_folder(tmp_path):
    with CheckpointFolder(tmp_path), pytest.raises(UserError, match="another run"):
        CheckpointFolder(tmp_path)
    CheckpointFolder(tmp_path).close()


def test_a_file_in_place_of_the_folder_and_links_in_it_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        CheckpointFolder(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="can't be written"):
        CheckpointFolder(tmp_path / "folder")
    (tmp_path / "folder" / "lock").unlink()
    (tmp_path / "folder" / "checkpoint-1.json").symlink_to(tmp_path / "file")
    save(tmp_path / "folder", "one")
    assert (tmp_path / "file").read_text() == "mine"


def loads_or_is_damaged(folder, kind: str, seed: int) -> None:
    """Of two checkpoints in `folder` the newer one is mutated."""
    path = folder / f"checkpoint-2.{kind}"
    whole = path.read_bytes()
    mutated = mutate(whole, seed)
    path.write_bytes(mutated)
    try:
        checkpoint, said = newest(folder)
    finally:
        path.write_bytes(whole)
    # Bytes that mean the same (a blank in the JSON) are no damage.
    assert checkpoint.body["name"] == ("one" if said else "two")
    assert all(sentence.count("\n") == 0 for sentence in said)
    if kind == "safetensors" and mutated != whole:
        assert said


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save(folder, "one", "two")
    return folder


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["json", "safetensors"]), seed=st.integers(0, 2**32))
def test_mutated_files_load_as_they_were_or_count_as_damaged(pair, kind, seed):
    loads_or_is_damaged(pair, kind, seed)


def test_a_body_nested_too_deep_counts_as_damaged(pair):
    path = pair / "checkpoint-2.json"
    whole = path.read_bytes()
    path.write_bytes(b"[" * 100_000)
    try:
        assert newest(pair)[0].body["name"] == "one"
    finally:
        path.write_bytes(whole)


def test_the_json_can_be_read_by_eye(pair):
    whole = json.loads((pair / "checkpoint-2.json").read_text())
    assert whole["format"] == "streamh2o checkpoint 2"
    assert whole["body"]["name"] == "two"
