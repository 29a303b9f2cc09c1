"""Learns from legs what engines have in their caches, and which prompts decode engines compute
alone.
"""

from collections.abc import Callable
from typing import Final

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, RequestId, Role, RoutingHints, SingleEngineReason
from pdrelay_proxy.core.protocol.kv_transfer_check import cached_share
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.leg_listener import LegListener
from pdrelay_proxy.io.request_path.caches import Caches

# of what was expected in a cache: with less the engine has evicted it; blocks are whole ones
_FAR: Final = 0.5
_BY_CACHE: Final = (SingleEngineReason.CACHED, SingleEngineReason.FASTER)
_DECODE: Final = Role.DECODE


class CacheLearning(LegListener):
    """For policies that go by caches."""

    def __init__(
        self, caches: Caches, registry: Registry, clock: Callable[[], float], *, remembers: bool
    ) -> None:
        """``remembers``: the policy of decode engines goes by caches, too.

        ``clock``: seconds; the one of the fleet.
        """
        self._caches = caches
        self._registry = registry
        self._clock = clock
        self._remembers = remembers

    def leg_sent(
        self,
        engine: Instance,
        request: RequestId,
        hints: RoutingHints,
        /,
        *,
        computes: bool,
        is_timed: bool,  # noqa: ARG002
    ) -> None:
        """Note a prompt that a decode engine computes alone."""
        if not (self._remembers and computes and engine.role is _DECODE and hints.prompt):
            return
        member = self._registry.get(engine.id)
        if member is not None:
            new = hints.blocks.size - self._caches.matched(engine, hints, is_there=True)
            member.lone.enter(request, max(0, new), self._clock())

    def prompt_computed(
        self, prefill: Instance, _request: RequestId, hints: RoutingHints, _counted: int | None, /
    ) -> None:
        """Note that the prompt is in the engine's cache."""
        self._caches.arrived(prefill, hints)

    def stream_begun(self, decode: Instance, request: RequestId, _hints: RoutingHints, /) -> None:
        """Note that a prompt is computed."""
        self.left(decode, request)

    def answered(self, decode: Instance, hints: RoutingHints, record: RequestRecord, /) -> None:
        """Note that the engine keeps prompt and answer, or has not kept what it should have."""
        if not self._remembers:
            return
        if record.single_reason in _BY_CACHE and record.cached is not None:
            share = cached_share(b"".join(record.end))
            cached, size = record.cached
            if share is not None and share * size < _FAR * cached:
                self._caches.forget(decode, hints, share)
                record.cache_missed_at = decode.id
                return
        self._caches.answered(decode, hints, record.relayed)

    def left(self, engine: Instance, request: RequestId, /) -> None:
        """Note that the engine computes nothing for it any more."""
        if self._remembers and (member := self._registry.get(engine.id)) is not None:
            member.lone.leave(request)
