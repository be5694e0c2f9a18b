"""Policies with their knobs in one word, as `compare` and `needle` take them: `NAME:KNOB=VALUE:KNOB=VALUE`."""

from __future__ import annotations

from typing import Any

from streamh2o.errors import UsageError
from streamh2o.policies import Policy, find_policy, make_policy


def policy_from_spec(spec: str, cache: int, sinks: int | None = None) -> Policy:
    """The policy that `spec` names, with `cache` slots. A knob is a field of the policy.

    sinks: where `spec` does not say, for a policy that keeps sinks at all. Raises UsageError that names the rule that
    is broken.
    """
    name, knobs = _parse(spec)
    if sinks is not None and find_policy(name).default_sinks:
        knobs.setdefault("sinks", sinks)
    return make_policy(name, cache=cache, **knobs)


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    name, *knobs = spec.split(":")
    values: dict[str, Any] = {}
    for knob in knobs:
        key, equals, value = knob.partition("=")
        if not key or not equals or not value:
            raise UsageError(f"--policy {spec}: write NAME:KNOB=VALUE, as in h2o:recent=64.")
        if key.strip() in ("name", "cache"):
            raise UsageError(
                f"--policy {spec}: {key.strip()} is no knob; name the policy first and its slots by --cache."
            )
        values[key.strip()] = _number(value.strip())
    return name, values


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
