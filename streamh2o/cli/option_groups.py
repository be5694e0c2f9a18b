"""Options that belong together, declared once as a dataclass and expanded into the options of each command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints


class Without:
    """In `Annotated[ModelOptions, Without("device_map")]`: fields that this command does not offer."""

    def __init__(self, *names: str) -> None:
        self.names = names


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer with an option for every field of its dataclass parameters, in their place.

    A field's type, default and help are those of the option. `command` itself is called with the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind, left_out = _group(hints[parameter.name])
        if kind is None:
            annotation, place = hints[parameter.name], inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=annotation, kind=place))
        else:
            options = _options(kind, left_out)
            groups[parameter.name] = kind, [option.name for option in options]
            parameters += options

    def call(**values: Any) -> None:
        for name, (kind, options) in groups.items():
            values[name] = kind(**{option: values.pop(option) for option in options})
        command(**values)

    call.__name__, call.__doc__, call.__module__ = command.__name__, command.__doc__, command.__module__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _group(hint: Any) -> tuple[type | None, tuple[str, ...]]:
    """The dataclass that `hint` names, None if it names none, and the fields it leaves out."""
    left_out: tuple[str, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        left_out = tuple(name for extra in extras if isinstance(extra, Without) for name in extra.names)
    return (hint if isinstance(hint, type) and is_dataclass(hint) else None), left_out


def _options(kind: type, left_out: tuple[str, ...]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
        if field.name not in left_out
    ]
