"""Policies by name. To add one: a file beside this one with a frozen dataclass, and its name in `POLICIES`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy, require_whole
from streamh2o.policies.full import Full
from streamh2o.policies.h2_only import H2Only
from streamh2o.policies.h2o import H2O
from streamh2o.policies.local import Local
from streamh2o.policies.recompute import Recompute
from streamh2o.policies.sparse_fixed import SparseFixed, SparseFixedH2
from streamh2o.policies.sparse_strided import SparseStrided, SparseStridedH2
from streamh2o.policies.spatten import SpAtten
from streamh2o.policies.streamh2o import StreamH2O
from streamh2o.policies.streamingllm import StreamingLLM
from streamh2o.policies.topk import TopK, TopKH2

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        StreamH2O,
        H2O,
        StreamingLLM,
        Local,
        Full,
        Recompute,
        H2Only,
        SparseStrided,
        SparseStridedH2,
        SparseFixed,
        SparseFixedH2,
        TopK,
        TopKH2,
        SpAtten,
    )
}


def make_policy(
    name: str = "streamh2o",
    cache: int = 1024,
    sinks: int | None = None,
    recent: int | None = None,
    hitters: int | None = None,
    **knobs: Any,
) -> Policy:
    """Build a policy by name; what is None takes the policy's default.

    `cache` = sinks + recent + hitters slots. Giving one of `recent` and `hitters` fixes the other. `knobs` are the
    policy's further fields (`far`, `decay`, `positions`, `reach`). Raises UsageError that names the rule broken.
    """
    try:
        cls = POLICIES[name]
    except KeyError:
        raise UsageError(f"No policy is called {name!r}; choose from {', '.join(POLICIES)}.") from None
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
    return cls(cache=cache, sinks=sinks, recent=recent, hitters=hitters, **{**cls.defaults(cache, recent), **given})


__all__ = ["POLICIES", "Policy", "make_policy"]
