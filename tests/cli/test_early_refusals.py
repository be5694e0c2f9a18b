"""What can be seen to be wrong before torch is imported is refused before: nobody waits seconds for a typing error."""

import subprocess
import sys

import pytest

CALL = """
import sys
from streamh2o.cli.main import run
try:
    run(sys.argv[1:])
finally:
    print("torch imported" if "torch" in sys.modules else "no torch")
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["generate", "--prompt", "a", "--temperature", "-1"], "--temperature is -1"),
        (["generate", "--prompt", "a", "--policy", "nope"], "No policy is called 'nope'"),
        (["generate", "--chat", "--policy", "nope"], "No policy is called 'nope'"),
        (["generate", "--prompt", "a", "--sinks", "-1"], "--sinks is -1"),
        (["generate", "--prompt", "a", "--chunk", "0"], "--chunk is 0"),
        (["generate", "--prompt", "a", "--dtype", "int8"], "--dtype int8"),
        (["generate", "missing.txt"], "missing.txt"),
        (["generate", "--prompt", "a", "--checkpoint", ""], "--checkpoint '': names no folder"),
        (["ppl", "README.md", "--checkpoint="], "--checkpoint '': names no folder"),
        (["compare", "README.md", "--out", ""], "--out '': names no folder"),
        (["needle", "README.md", "--out", " "], "--out ' ': names no folder"),
        (["answer", "README.md"], "no question"),
        (["answer", "README.md", "-q", "Who?", "--chunk", "0"], "--chunk is 0"),
        (["answer", "README.md", "-q", "Who?", "--kernel", "fast"], "--kernel fast"),
        (["needle", "README.md", "--policy", "h2o:recent=x"], "recent"),
        (["needle", "README.md", "--kinds", "colour"], "no kind 'colour'"),
        (["needle", "README.md", "--task", "riddles"], "--task riddles"),
    ],
)
def test_a_wrong_value_is_refused_without_torch(line, words):
    done = subprocess.run([sys.executable, "-c", CALL, *line], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == "no torch\n"
