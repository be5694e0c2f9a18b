"""Policies that other installed packages bring: entry points of the group `streamh2o.policies`, NAME = MODULE:CLASS.

Nothing of such a package is imported before one of its policies is asked for by name.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from streamh2o.errors import UserError
from streamh2o.policies.base import Policy

GROUP = "streamh2o.policies"


@cache
def plugin_names() -> dict[str, tuple[EntryPoint, ...]]:
    """The names that installed packages give, in order, each with the packages' entry points of that name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, _package(point))):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def refuse_replaced(name: str) -> None:
    """Raise UserError where an installed package gives `name`, one of streamh2o's own, to a policy of its own."""
    for point in plugin_names().get(name, ()):
        raise UserError(
            f"{_package(point)} brings a policy called {name!r}, and streamh2o has one of that name itself; rename it "
            "there or uninstall that package."
        )


def load_plugin(name: str) -> type[Policy] | None:
    """The class that an installed package calls `name`, None where no package does.

    Raises UserError, naming the package, where the class can't be imported, is no policy or has another name, or where
    two packages give the same name.
    """
    points = plugin_names().get(name, ())
    if not points:
        return None
    if len(points) > 1:
        packages = " and ".join(_package(point) for point in points)
        raise UserError(f"{packages} each bring a policy called {name!r}; uninstall all but one of them.")
    whose = f"The policy {name!r} of {_package(points[0])}"
    try:
        kind = points[0].load()
    except Exception as error:  # whatever its import runs into
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{whose} can't be imported ({reason[:200]}); mend or uninstall that package.") from error
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UserError(f"{whose} is no policy: {points[0].value} must be a class derived from streamh2o.Policy.")
    if isinstance(kind.name, str) and kind.name != name:
        raise UserError(f"{whose} calls itself {kind.name!r}; its class and its entry point must give the same name.")
    return kind


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name if point.dist else 'of an unknown name'}"
