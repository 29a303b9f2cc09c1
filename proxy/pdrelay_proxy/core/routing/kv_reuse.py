"""Which settings have a router use the KV that its engines have, and which of them one does not
use.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from pdrelay_proxy.settings import PolicyName, Settings

# What a later turn of a chat may have of new JSON for its decode engine to compute it:
# docs/routing.md has the numbers.
FOLLOW_UP_BYTES: Final = 1500


def reused_kv(
    chosen: Mapping[str, object],
    by_features: Mapping[str, object],
    policies_of_features: Sequence[str],
) -> Mapping[str, object]:
    """Return what ``reuse_kv`` sets beside what was chosen: the rest of it, as far as both go
    together.

    ``by_features``: what it sets of theirs, where a policy goes by caches;
    ``policies_of_features``: do, for both legs.
    """
    policies = [chosen.get(name) for name in ("prefill_policy", "decode_policy")]
    usual: str = next(
        (name for name in policies_of_features if name in policies), PolicyName.PREFIX
    )
    by_cache = {PolicyName.PREFIX, *policies_of_features}
    prefill, decode = [usual if policy is None else policy for policy in policies]
    wanted: dict[str, object] = {"prefill_policy": prefill, "decode_policy": decode}
    if not by_cache.isdisjoint((prefill, decode)):
        wanted |= by_features
    if decode in by_cache:  # others forget what decode engines have
        wanted |= {"return_kv": True, "min_split_new_bytes": FOLLOW_UP_BYTES}
    return {name: value for name, value in wanted.items() if name not in chosen}


def unused_kv(
    settings: Settings, by_features: Sequence[str], policies_of_features: Sequence[str]
) -> str | None:
    """Say in a sentence what a router does not use; None: it uses all of it, or what its operator
    left of that.

    ``by_features``: what it does not use of theirs; ``policies_of_features``: go by caches.
    """
    if settings.reuse_kv:
        return None
    unused = list[str]()
    if {settings.prefill_policy, settings.decode_policy}.isdisjoint(
        (PolicyName.PREFIX, *policies_of_features)
    ):
        unused.append(
            "engines are not chosen by what they have cached (prefill_policy, decode_policy)"
        )
    unused += by_features
    if not settings.return_kv:
        unused.append("KV of answers does not go back (return_kv)")
    if not settings.min_split_new_bytes:
        unused.append("short follow-ups go over two engines (min_split_new_bytes)")
    return (
        f"{'; '.join(unused)}: --reuse-kv true uses all that the engines offer" if unused else None
    )
