"""Reads the metrics of all decode engines again and again: does KV arrive, whose fails, how busy
are they?

A prefill engine's are read only where a decode engine's give a reason.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import (
    incompatible_peers,
    read,
    received,
    shown_load,
    started,
)
from pdrelay_proxy.core.fleet.kv_inflow import KvInflow
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, Role
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.io.probes.metrics_listener import MetricsListener
from pdrelay_proxy.io.probes.metrics_round import read_all
from pdrelay_proxy.io.request_path.telemetry import Telemetry

logger = logging.getLogger(__name__)
EVERY_S = 15.0


class EngineMetricsWatch:
    """One task; run it for as long as the router serves."""

    def __init__(
        self,
        registry: Registry,
        metrics: Callable[[Instance], Awaitable[bytes]],
        telemetry: Telemetry,
        listeners: Sequence[MetricsListener] = (),
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._metrics = metrics  # raises ProbeFailed
        self._telemetry = telemetry
        self._every_s = every_s
        self._clock = clock  # seconds; the one of the registry's times
        self._inflow = KvInflow()
        self._listeners = listeners

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Look while the block lasts."""
        trouble = "the counters of the decode engines could not be compared"
        async with meanwhile(repeatedly(self._every_s, self.read_engines, logger, trouble)):
            yield

    async def read_engines(self) -> None:
        """Look at every decode engine once, some of them at the same time."""
        decodes = self._registry.known(Role.DECODE)
        known = (*decodes, *self._registry.known(Role.PREFILL))
        # also if nobody ever looks at the numbers
        self._telemetry.keep(frozenset(instance.id for instance in known))
        self._inflow.keep(frozenset(decode.id for decode in decodes))
        incompatible = await read_all(decodes, self._read_decode, self._every_s)
        refused = frozenset[str]().union(*incompatible)
        doubtful = list[Instance]()
        for listener in self._listeners:
            prefills = listener.prefills_to_read(self._clock())
            await read_all(prefills, partial(self._show_prefill, listener), self._every_s)
            doubtful += listener.round_over()
        # They may have been restarted, under other ids.
        restarted = [
            prefill
            for prefill in self._registry.known(Role.PREFILL)
            if self._registry.facts(prefill).engine_id in refused or prefill in doubtful
        ]
        await read_all(restarted, self._learn_id, self._every_s)

    async def _read_decode(self, decode: Instance) -> frozenset[str]:
        """Look at a decode engine; return the engine ids of those that it cannot load from."""
        # before the engine counts: see KvInflow
        promised = self._telemetry.transfers_expected[decode.id]
        exposition = await self._read(decode)
        tokens_received = received(exposition, decode.rank)
        refused = frozenset[str]()
        if exposition:
            refused = incompatible_peers(exposition, decode.rank)
            now = self._clock()
            facts = EngineCapabilities(incompatible=refused)
            member = self._registry.get(decode.id)
            if member is not None and started(exposition) not in (None, member.facts.started):
                # another process by now: what else it is, the next probe asks
                facts = read(exposition, decode.rank).facts.updated(facts)
                member.asked_at = -math.inf
            self._registry.learn(decode.id, facts)
            # With ranks the load is that of all of them together.
            if member is not None and decode.rank is None and member.life.may_serve(now=now):
                load = shown_load(exposition, now=now)
                if load is not None and load.kv_usage is not None:
                    member.load.kv_shown(load.kv_usage, now=now)
            for listener in self._listeners:
                listener.decode_shown(decode, exposition, now)
        if dry := self._inflow.missing_legs(decode.id, tokens_received, promised):
            warning = (
                "%s got no KV cache for its last %d legs with a transfer: it computes the prompts"
            )
            logger.warning(warning, decode.id, dry)
            self._telemetry.transfers_missing(decode.id, dry)
        return refused

    async def _show_prefill(self, listener: MetricsListener, prefill: Instance) -> None:
        if exposition := await self._read(prefill):
            listener.prefill_shown(prefill, exposition)

    async def _learn_id(self, prefill: Instance) -> None:
        shown = read(await self._read(prefill), prefill.rank)
        self._registry.learn(prefill.id, shown.facts)

    async def _read(self, instance: Instance) -> bytes:
        """Return an engine's metrics; nothing, if it does not answer: the prober says so.

        One that has missed its last probe is not asked: it could hold up the round until a timeout.
        """
        member = self._registry.get(instance.id)
        if member is not None and member.life.misses:
            return b""
        try:
            return await self._metrics(instance)
        except ProbeFailed:
            return b""
