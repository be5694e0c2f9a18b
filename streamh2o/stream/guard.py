"""A forward in place of a module's own, and giving it back whatever happens meanwhile."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def and_back(call: Callable[[], Any], back: Callable[[], None]) -> Any:
    """What `call` gives; then `back`, whatever happens and to its end: Ctrl-C meanwhile is raised after it."""
    try:
        return call()
    finally:
        interrupt = None
        while True:  # here and not in a function of its own, at whose first line Ctrl-C can already be raised
            try:
                back()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class Guard:
    """The forward of a lent module: gives the module, its own forward and the arguments to `call`."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call
        self._before: Forward | None = module.__dict__.get("forward")  # such as accelerate gives
        self.__signature__ = inspect.signature(module.forward)

    def _own(self, module: nn.Module) -> Forward:
        return self._before or MethodType(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        return self._call(module, self._own(module), args, kwargs)

    def remove(self, module: nn.Module) -> None:
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._before

    def __reduce__(self) -> Any:
        """A copy of the model, or a file of it, has the model's own forward: nothing is lent to it."""
        module: Any = self._module()
        return MethodType, (type(module).forward, module)


def set_forward(module: nn.Module | None, forward: Forward) -> None:
    if module is not None and "forward" not in module.__dict__:
        module.__dict__["forward"] = forward


def unset_forward(module: nn.Module | None, forward: Forward) -> None:
    if module is not None and module.__dict__.get("forward") is forward:
        del module.__dict__["forward"]
