"""The choice of the decode engine that a prefill engine may ask for KV of earlier answers."""

from typing import Final

from pdrelay_proxy.core.model import InstanceId, Role, RoutingHints
from pdrelay_proxy.core.protocol.returned_kv import CachedOn
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet

LEAST: Final = 256  # bytes of the prompt: with less, an engine is not worth a question


def cached_on(
    fleet: LiveFleet, hints: RoutingHints, prefill: InstanceId | None = None
) -> CachedOn | None:
    """Return the decode engine whose cache has most of the prompt; None if none is known to have
    enough of it.

    ``prefill``: the engine that is told so, which need not be told of itself.

    A data-parallel rank is not named: its engine's metrics do not say by which id others know it.
    """
    caches = fleet.caches
    if caches is None or not hints.prompt:
        return None
    most = LEAST
    best = None
    for instance in fleet.known(Role.DECODE):
        engine_id = fleet.registry.facts(instance).engine_id
        if engine_id is None or instance.rank is not None or instance.id == prefill:
            continue
        size = caches.matched(instance, hints, is_there=True)
        if size > most:
            most = size
            best = engine_id
    return None if best is None else CachedOn(best, min(1.0, most / max(1, hints.blocks.size)))
