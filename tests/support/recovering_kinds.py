"""Pairs of :mod:`support.async_kinds` whose transfer agents replace broken connections and broken backends."""

from pdrelay_connector.core.ports import XferOutcome
from pdrelay_connector.io.recovering_agent import OpenBackend, RecoveringAgent
from support.async_kinds import AsyncEngine, AsyncPair
from support.cache_kinds import Copier
from support.scheduled_engine import TRANSFER


class Backend(Copier):
    """What fails may have moved a part of it."""

    is_closed = False

    def poll(self):
        before = dict(self._xfers)
        ends = super().poll()
        for flight in [before[end.xfer] for end in ends if end.outcome is not XferOutcome.DONE]:
            if flight.memory in self._network.memories and not flight.cancelled:
                flight.spans = flight.spans[: self.world.dice.randrange(len(flight.spans) + 1)]
                self._copy(flight)
        return ends

    def _copy(self, flight):
        assert not self.is_closed, "a backend that was closed moves KV"
        super()._copy(flight)


class RecoveringEngine(AsyncEngine):
    """One engine; ``movers`` are all backends that are open."""

    def make_agent(self, info):
        clock = lambda: self.world.now  # noqa: E731
        return RecoveringAgent(self._open(info), lambda: self._build(info), self.worker_counters,
                               timeout=TRANSFER, clock=clock)  # fmt: skip

    def _open(self, info):
        self.movers.append(backend := Backend(self.world.network, info.agent.decode(), self.world, info))
        return backend

    def _build(self, info):
        self.world.counts["rebuilt"] += 1
        backend = self._open(info)
        return OpenBackend(backend, lambda: self._close(backend))

    def _close(self, backend):
        assert not backend._xfers, "a backend is closed with transfers in flight"
        backend.is_closed = True
        self.movers.remove(backend)


class RecoveringPair(AsyncPair):
    """Backends and connections of both engines break and stall, until all is healed."""

    engine_class = RecoveringEngine
    breaks = 0.12
    heals = 0.05
    waits = 0.2
    rest = 130.0  # longer than a quarantine

    def round(self, *, but=None):
        """A backend stalls for a while, loses its connection, or breaks for good; time may pass."""
        for engine, other in ((self.p, self.d), (self.d, self.p)):
            for mover in engine.movers:
                chance = self.dice.random()
                if chance < self.breaks * 0.3:
                    mover.stuck, mover.clinging = True, self.dice.random() < 0.7
                elif chance < self.breaks * 0.5:
                    mover.broken = True
                elif chance < self.breaks:
                    mover.lose(f"{other.agent}/0")
                elif chance > 1 - self.heals:
                    mover.stuck = mover.clinging = False
        if but is None and self.dice.random() < self.waits:
            self.now += self.dice.choice((1.0, TRANSFER + 1))
        super().round(but=but)

    def heal(self):
        """End what is wrong, but for broken backends: others replace them, or what they move is computed."""
        super().heal()
        self.breaks = self.waits = 0.0
