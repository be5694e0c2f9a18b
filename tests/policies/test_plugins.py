"""Policies of other packages: named on the command line, refused in a sentence, and never in place of our own."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamh2o.errors import UsageError, UserError
from streamh2o.policies import Policy, find_policy, make_policy
from streamh2o.policies.plugins import plugin_names
from tests import tiny

THEIRS = '''
from dataclasses import dataclass
from typing import ClassVar

from streamh2o import Policy

print("imported")


@dataclass(frozen=True)
class Stride(Policy):
    """Keeps sinks, recent tokens and of the middle every `step`-th token."""

    name: ClassVar[str] = "theirs"
    scored: ClassVar[bool] = False
    step: int = 7

    def priority(self, scores, source_index, seen):
        return source_index + seen * (source_index % self.step == 0)


class NoPolicy:
    pass
'''


def install(folder: Path, package: str, points: dict[str, str], code: str = THEIRS) -> Path:
    """What pip leaves in `folder` of a package with these entry points."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    about = folder / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (about / "entry_points.txt").write_text(f"[streamh2o.policies]\n{lines}")
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that packages can be installed into; they are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    plugin_names.cache_clear()
    yield tmp_path
    plugin_names.cache_clear()
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def command(site: Path, *arguments) -> subprocess.CompletedProcess[str]:
    """`streamh2o` in a process that finds what is installed in `site`."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    line = [sys.executable, "-m", "streamh2o", *map(str, arguments)]
    return subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240)


def test_the_command_runs_a_policy_of_another_package(tmp_path, folder):
    install(tmp_path, "their-policies", {"theirs": "their_policies:Stride"})
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    options = "--model", folder, "--cache", 64, "--chunk", 32, "--kernel", "torch", "--json", "-", "--quiet"
    done = command(tmp_path, "ppl", text, "--policy", "theirs", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported\n")
    result = json.loads(done.stdout.removeprefix("imported\n"))
    assert (result["policy"], result["step"], result["cache"]) == ("theirs", 7, 64)
    assert result["evictions"] > 0


def test_an_unknown_name_is_answered_with_theirs_too_in_exit_code_2(tmp_path):
    install(tmp_path, "their-policies", {"theirs": "their_policies:Stride"})
    done = command(tmp_path, "ppl", "-", "--policy", "other")
    assert (done.returncode, done.stdout) == (2, "")  # listed, not imported
    assert "No policy is called 'other'; choose from streamh2o, h2o," in done.stderr
    assert re.search(r"spatten, .*\btheirs\b", done.stderr)  # beside those of whoever runs this test


def test_its_knobs_are_those_of_its_class(site):
    install(site, "their-policies", {"theirs": "their_policies:Stride"})
    assert make_policy("theirs", 64, step=3).step == 3
    with pytest.raises(UsageError, match=r"no knob 'stride'; it has .*step"):
        make_policy("theirs", 64, stride=3)
    with pytest.raises(UsageError, match=r"--step is 2\.5; it must be a whole number"):
        make_policy("theirs", 64, step=2.5)


def test_a_built_in_name_imports_nothing_of_theirs(site):
    install(site, "their-policies", {"theirs": "their_policies:Stride"}, code="raise SystemError")
    assert make_policy("h2o", 64).name == "h2o"
    assert "their_policies" not in sys.modules


@pytest.mark.parametrize(
    ("points", "code", "sentence"),
    [
        ({"theirs": "their_policies:Stride"}, "import nowhere_to_be_found", r"ModuleNotFoundError.*mend or uninstall"),
        ({"theirs": "their_policies:Stride"}, "def f(:", r"SyntaxError.*mend or uninstall"),
        ({"theirs": "their_policies:Strude"}, THEIRS, r"AttributeError.*mend or uninstall"),
        ({"theirs": "their_policies:NoPolicy"}, THEIRS, "must be a class derived from streamh2o.Policy"),
        ({"others": "their_policies:Stride"}, THEIRS, "calls itself 'theirs'"),
    ],
)
def test_one_that_is_broken_is_refused_in_a_sentence_that_names_its_package(site, points, code, sentence):
    install(site, "their-policies", points, code)
    with pytest.raises(UserError, match=f"the package their-policies.*{sentence}"):
        find_policy(next(iter(points)))


def test_the_name_of_a_built_in_policy_is_refused_and_the_others_still_run(site):
    install(site, "their-policies", {"h2o": "their_policies:Stride"})
    with pytest.raises(UserError, match="their-policies brings a policy called 'h2o', and streamh2o has one"):
        make_policy("h2o", 64)
    assert make_policy("spatten", 64).name == "spatten"


def test_one_name_of_two_packages_is_refused_with_both(site):
    install(site, "their-policies", {"theirs": "their_policies:Stride"})
    install(site, "more-policies", {"theirs": "more_policies:Stride"})
    with pytest.raises(UserError, match="more-policies and the package their-policies each bring"):
        find_policy("theirs")


def kept_by(priority, **line):
    """The losses of a stream whose policy has this `priority`."""
    namespace = {"name": "theirs", "priority": priority, "__module__": "their_policies", "__qualname__": "Theirs"}
    kind = dataclass(frozen=True)(type("Theirs", (Policy,), namespace))
    return tiny.stream_losses(tiny.llama(), kind(16, 4, 4, 8), tiny.tokens(60), 8, **line)


@pytest.mark.parametrize("evict", ["chunk", "token"])
@pytest.mark.parametrize(
    ("priority", "sentence"),
    [
        (lambda self, scores, source_index, seen: scores[:, :, :-1], "shapes"),
        (lambda self, scores, source_index, seen: scores.mean(1, keepdim=True), "shapes"),
        (lambda self, scores, source_index, seen: scores * float("nan"), "no numbers"),
        (lambda self, scores, source_index, seen: source_index % 2 == 0, "no numbers"),
        (lambda self, scores, source_index, seen: None, "can't say what to keep"),
        (lambda self, scores, source_index, seen: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_priority_that_is_none_is_refused_and_not_guessed_at(priority, sentence, evict):
    with pytest.raises(UserError, match=f"The policy theirs .*{sentence}"):
        kept_by(priority, evict=evict)
