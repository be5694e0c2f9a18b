import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no-such-backend"])
def test_a_picture_is_drawn_whatever_backend_the_environment_names(tmp_path, backend):
    program = (
        "import os, pathlib, sys; from streamh2o.report.picture import picture\n"
        "with picture(pathlib.Path('a.png'), (2, 2)) as figure: figure.subplots().plot([1, 2])\n"
        "assert 'matplotlib.pyplot' not in sys.modules; print(os.environ['MPLBACKEND'])"
    )
    environment = {**os.environ, "MPLBACKEND": backend, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, backend), done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
