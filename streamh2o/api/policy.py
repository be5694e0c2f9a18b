"""What a caller gives as a policy (a name with its knobs, or a policy) as a `Policy`."""

from __future__ import annotations

from typing import Any

from streamh2o.policies import Policy, make_policy


def to_policy(policy: str | Policy, cache: int, **knobs: Any) -> Policy:
    """The policy of that name with `cache` slots, see `make_policy`; a `Policy` is as it is, its numbers its own."""
    return policy if isinstance(policy, Policy) else make_policy(policy, cache, **knobs)
