"""Policies of other packages: those that are installed under the entry point group
``pdrelay.routing_policies``.

The entry point's name is the policy's, for --prefill-policy and --decode-policy; what it names is
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
    """Name the policies that other packages have; the router's own names are its own."""
    return sorted({found.name for found in entry_points(group=GROUP)} - set(PolicyName))


def installed_policy(name: str, parts: PolicyParts, by_features: Sequence[str]) -> Policy:
    """Load a policy and build it; raises ConfigError: there is none of this name, or it cannot be
    built.

    ``by_features``: the names of policies that features have, for the sentence.
    """
    found = next((each for each in entry_points(group=GROUP) if each.name == name), None)
    if found is None:
        known = ", ".join([*PolicyName, *by_features, *installed_policies()])
        raise ConfigError(f"there is no policy {name!r}: there are {known}")
    policy = _built(found, parts)
    missing = [
        method for method in ("choose", "copy") if not callable(getattr(policy, method, None))
    ]
    if missing:
        raise ConfigError(
            f"the policy {name!r} ({found.value}) has no method {' and no method '.join(missing)}"
        )
    return policy


def _built(found: EntryPoint, parts: PolicyParts) -> Policy:
    try:
        built: Policy = found.load()(parts)
    except Exception as exc:
        # whatever another package raises, a test has one that cannot be imported
        raise ConfigError(
            f"the policy {found.name!r} ({found.value}) cannot be loaded: {exc!r}"
        ) from exc
    return built
