import io
import os
import stat

import pytest

from streamh2o.errors import UserError
from streamh2o.text.rereadable import Rereadable
from streamh2o.text.sources import Source, open_inputs


def test_a_pipe_is_kept_where_nobody_else_can_read_it_and_leaves_nothing(tmp_path):
    data = b"line one\nline two\n" * 100
    with Rereadable(Source("stdin", None, lambda: io.BytesIO(data)), tmp_path) as text:
        with text.source.open() as stream:
            while stream.read(64):
                pass
        assert text.read(9, 17) == b"line two"
        assert text.lines([0, 9, len(data) - 1]) == {0: 1, 9: 2, len(data) - 1: 200}
        assert stat.S_IMODE(os.fstat(text._copy.fileno()).st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_read_again_in_place(tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes("Élan vital.\r\n".encode() * 9)
    with Rereadable(open_inputs([book])[0], tmp_path / "missing") as text:
        assert text.read(3, 40) == book.read_bytes()[3:40]
        assert text.read(book.stat().st_size - 2, 10**9) == b"\r\n"


def test_a_copy_that_cannot_be_made_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="TMPDIR"):
        Rereadable(Source("stdin", None, io.BytesIO), tmp_path / "missing")
