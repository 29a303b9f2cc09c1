"""Routing policies of other packages, installed under the entry point group
``pdrelay.routing_policies``.

The entry point's name is the policy's, for --prefill-policy and --decode-policy. Its object is
called once with the PolicyParts (core/routing/policy_parts.py), and returns a Policy
(core/routing/pairing.py) for one leg.
"""

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from pdrelay_proxy.core.routing.pairing import Policy
from pdrelay_proxy.core.routing.policy_parts import PolicyParts
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import PolicyName

GROUP: Final = "pdrelay.routing_policies"


def installed_policies() -> Sequence[str]:
    """Name the policies of other packages; the router's own names cannot be replaced."""
    return sorted({entry.name for entry in entry_points(group=GROUP)} - set(PolicyName))


def installed_policy(name: str, parts: PolicyParts, by_features: Sequence[str]) -> Policy:
    """Load a policy and build it.

    Raises ConfigError: there is none of this name, or it cannot be built. ``by_features``: names of
    policies of features, for the error's text.
    """
    entry = next(
        (candidate for candidate in entry_points(group=GROUP) if candidate.name == name), None
    )
    if entry is None:
        known = ", ".join([*PolicyName, *by_features, *installed_policies()])
        raise ConfigError(f"there is no policy {name!r}: there are {known}")
    policy = _built(entry, parts)
    missing = [
        method for method in ("choose", "copy") if not callable(getattr(policy, method, None))
    ]
    if missing:
        raise ConfigError(
            f"the policy {name!r} ({entry.value}) has no method {' and no method '.join(missing)}"
        )
    return policy


def _built(entry: EntryPoint, parts: PolicyParts) -> Policy:
    try:
        built: Policy = entry.load()(parts)
    except Exception as exc:
        # another package may raise anything; a test has one that cannot be imported
        raise ConfigError(
            f"the policy {entry.name!r} ({entry.value}) cannot be loaded: {exc!r}"
        ) from exc
    return built
