"""Policies by name. To add one: a file beside this one with a frozen dataclass, and its name in `POLICIES`.

A policy of another package needs no change here; see `plugins`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy, require_whole
from streamh2o.policies.full import Full
from streamh2o.policies.h2_only import H2Only
from streamh2o.policies.h2o import H2O
from streamh2o.policies.local import Local
from streamh2o.policies.mixed import H2_SHARE
from streamh2o.policies.plugins import load_plugin, plugin_names, refuse_replaced
from streamh2o.policies.recompute import Recompute
from streamh2o.policies.sparse_fixed import SparseFixed
from streamh2o.policies.sparse_strided import SparseStrided
from streamh2o.policies.spatten import SpAtten
from streamh2o.policies.streamh2o import StreamH2O
from streamh2o.policies.streamingllm import StreamingLLM
from streamh2o.policies.topk import TopK

POLICIES: dict[str, type[Policy]] = {
    "streamh2o": StreamH2O,
    "h2o": H2O,
    "streamingllm": StreamingLLM,
    "local": Local,
    "full": Full,
    "recompute": Recompute,
    "h2-only": H2Only,
    "sparse-strided": SparseStrided,
    "sparse-strided+h2": SparseStrided,
    "sparse-fixed": SparseFixed,
    "sparse-fixed+h2": SparseFixed,
    "topk": TopK,
    "topk+h2": TopK,
    "spatten": SpAtten,
}
# Knobs that a name stands for; what the user gives goes before.
_KNOBS: dict[str, dict[str, Any]] = {name: {"share": H2_SHARE} for name in POLICIES if name.endswith("+h2")}
_OWN = frozenset(POLICIES)


def find_policy(name: str) -> type[Policy]:
    """The class of the policy called `name`: one of `POLICIES`, or one that another installed package brings.

    Raises UsageError where there is none, UserError where the package's can't be used.
    """
    if name in _OWN:
        refuse_replaced(name)
    kind = POLICIES.get(name) or load_plugin(name)
    if kind is None:
        names = ", ".join(dict.fromkeys([*POLICIES, *plugin_names()]))
        raise UsageError(f"No policy is called {name!r}; choose from {names}.")
    return kind


def make_policy(
    name: str = "streamh2o",
    cache: int = 1024,
    sinks: int | None = None,
    recent: int | None = None,
    hitters: int | None = None,
    **knobs: Any,
) -> Policy:
    """Build a policy by name; what is None takes the policy's default.

    name: one of `POLICIES`, or what another installed package calls its policy. cache: sinks + recent + hitters slots;
    one of `recent` and `hitters` fixes the other. knobs: the policy's further fields (`far`, `decay`, `positions`,
    `reach`). Raises UsageError that names the rule broken.
    """
    cls = find_policy(name)
    for option, count in (("cache", cache), ("sinks", sinks), ("recent", recent), ("hitters", hitters)):
        if count is not None:
            require_whole(option, count)
    if sinks is None:
        sinks = cls.default_sinks
    known = {field.name for field in fields(cls)}
    given = {knob: value for knob, value in knobs.items() if value is not None}
    for knob in given:
        if knob not in known:
            raise UsageError(f"The policy {name} has no knob {knob!r}; it has {', '.join(sorted(known))}.")
    if cache < sinks + 1:
        raise UsageError(f"--cache {cache} leaves no slot beside {sinks} sinks; it must be at least {sinks + 1}.")
    default_recent, default_hitters = cls.split(cache, sinks)
    if recent is None and hitters is None:
        recent, hitters = default_recent, default_hitters
    elif recent is None:
        assert hitters is not None
        recent = cache - sinks - hitters
    elif hitters is None:
        hitters = cache - sinks - recent
    if default_hitters == 0 and hitters > 0:
        raise UsageError(f"The policy {name} keeps no hitters; leave --hitters and --recent out.")
    further = {**cls.defaults(cache, recent), **_KNOBS.get(name, {}), **given}
    return cls(cache=cache, sinks=sinks, recent=recent, hitters=hitters, **further)


__all__ = ["POLICIES", "Policy", "find_policy", "make_policy"]
