"""What `import streamh2o` gives: every public name, each imported only when it is asked for."""

import ast
import inspect
import subprocess
import sys

import pytest

import streamh2o

FUNCTIONS = [name for name in streamh2o.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", streamh2o.__all__)
def test_every_name_is_there_and_listed(name):
    assert getattr(streamh2o, name) is not None
    assert name in dir(streamh2o)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'streamh2o' has no attribute 'perplexty'"):
        streamh2o.perplexty  # noqa: B018


def test_importing_it_imports_nothing_slow():
    code = "import streamh2o, sys; dir(streamh2o); print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_explains_itself(name):
    """The docstring speaks of each parameter, so that `help` answers what it shows."""
    function = getattr(streamh2o, name)
    text = inspect.getdoc(function) or ""
    assert len(text.split()) > 10
    unknown = [p for p in inspect.signature(function).parameters if p not in text]
    assert not unknown


def test_type_checkers_see_where_each_name_comes_from():
    tree = ast.parse(inspect.getsource(streamh2o))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen == {name: f"streamh2o.{module}" for name, module in streamh2o._FROM.items()}
