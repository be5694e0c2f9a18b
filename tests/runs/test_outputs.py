import os
from pathlib import Path

import pytest

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.outputs import check_outputs, write_whole


def test_a_missing_folder_is_named_before_the_start(tmp_path):
    with pytest.raises(UsageError, match=r"--json .*no folder .*gone"):
        check_outputs({"--json": tmp_path / "gone" / "a.json"}, [])


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(UsageError, match=r"--log .*folder"):
        check_outputs({"--log": tmp_path}, [])


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"--log .*: not a possible file name"):
        check_outputs({"--log": tmp_path / name}, [])


def test_two_options_may_not_name_one_file(tmp_path):
    (tmp_path / "sub").mkdir()
    with pytest.raises(UsageError, match="different files"):
        check_outputs({"--json": tmp_path / "a", "--log": tmp_path / "sub" / ".." / "a"}, [])


@pytest.mark.parametrize("way", ["same", "symlink", "hardlink"])
def test_an_input_is_never_overwritten(tmp_path, way):
    book, out = tmp_path / "book.txt", tmp_path / "out"
    book.write_text("text")
    if way == "same":
        out = book
    elif way == "symlink":
        out.symlink_to(book)
    else:
        out.hardlink_to(book)
    with pytest.raises(UsageError, match="overwrite an input"):
        check_outputs({"--log": out}, [str(book)])


def test_a_file_of_the_model_is_never_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="or the model"):
        check_outputs({"--json": tmp_path / "config.json"}, [str(tmp_path)])
    check_outputs({"--json": tmp_path / "new.json"}, [str(tmp_path)])


def test_writing_whole_replaces_a_link_instead_of_following_it(tmp_path):
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("precious")
    link.symlink_to(kept)
    write_whole(link, b"new")
    assert kept.read_text() == "precious"
    assert link.read_bytes() == b"new"


def test_writing_whole_leaves_nothing_beside_and_keeps_the_usual_permissions(tmp_path):
    mask = os.umask(0o022)
    try:
        write_whole(tmp_path / "a", b"new")
    finally:
        os.umask(mask)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_is_one_sentence():
    with pytest.raises(UserError, match=r"/dev/full: can't be written \(no space left on device\)"):
        write_whole(Path("/dev/full"), b"x")
