"""NIXL, and the only file that imports it. Its exceptions stop here."""

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nixl import _api as nixl_api

from xpyd_connector.core.ids import TransferId
from xpyd_connector.core.messages import RankInfo, Region
from xpyd_connector.core.ports import Ended, Indices, Outcome
from xpyd_connector.errors import TransferError

_bindings = nixl_api.nixlBind
# NIXL's exceptions have no common base but Exception: list what the library can raise.
NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for kind in vars(_bindings).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__name__.startswith("nixl")
)


def make_agent(name: str, *, progress_delay_us: int) -> Any:
    """Return a NIXL agent with the UCX backend whose progress thread polls every ``progress_delay_us`` microseconds.

    nixl 1.5.1's Python agent fixes that delay at 0, which costs a whole core per agent, idle or not. The inner agent
    is replaced before any backend, and with it any thread, exists. STRICT: our thread and NIXL's both enter it.
    """
    strict = nixl_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = nixl_api.nixl_agent(name, nixl_api.nixl_agent_config(backends=[], sync_mode=strict))
    config = _bindings.nixlAgentConfig()
    config.useProgThread = True
    config.syncMode = strict.value
    config.pthrDelay = progress_delay_us
    config.captureTelemetry = True
    agent.agent = _bindings.nixlAgent(name, config)
    try:
        agent.create_backend("UCX")
    except NIXL_ERRORS as exc:
        raise TransferError(f"NIXL cannot start its UCX backend: {exc}") from exc
    return agent


@dataclass(slots=True)
class _Flight:
    handle: Any
    posted_at: float
    cancelled: bool = False


class NixlMover:
    """Implements :class:`~xpyd_connector.core.ports.Mover`. One thread owns it after construction."""

    def __init__(self, agent: Any, memory: str, device: int, regions: Sequence[Region]) -> None:
        self._agent = agent
        self._memory = memory
        self._local = _prepare(agent, "NIXL_INIT_AGENT", memory, device, regions)
        self._peers: dict[str, Any] = {}
        self._numbers = map(TransferId, itertools.count(1))
        self._flights: dict[TransferId, _Flight] = {}
        self._ended: list[Ended] = []

    def attach(self, peer: RankInfo) -> str:
        """Load a remote rank's metadata."""
        try:
            name = self._agent.add_remote_agent(peer.agent)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._peers[name] = _prepare(self._agent, name, peer.memory, peer.device, peer.regions)
        except NIXL_ERRORS as exc:
            raise TransferError(f"NIXL cannot use the peer's metadata: {exc}") from exc
        return name

    def detach(self, handle: str) -> None:
        """Forget a remote rank; its endpoint closes, so that nothing of it reaches our memory afterwards."""
        with contextlib.suppress(*NIXL_ERRORS):  # the peer may be gone already: then there is nothing to close
            if (descriptors := self._peers.pop(handle, None)) is not None:
                self._agent.release_dlist_handle(descriptors)
            self._agent.remove_remote_agent(handle)

    def read(self, handle: str, remote: Indices, local: Indices) -> TransferId:
        """Post a READ."""
        try:
            xfer = self._agent.make_prepped_xfer("READ", self._local, local, self._peers[handle], remote)
            state = self._agent.transfer(xfer)
        except NIXL_ERRORS as exc:
            raise TransferError(f"NIXL cannot start a read: {exc}") from exc
        number = next(self._numbers)
        self._flights[number] = _Flight(xfer, time.monotonic())
        if state == "ERR":
            self._end(number, Outcome.FAILED, "the read failed when it was posted")
        return number

    def cancel(self, transfer: TransferId) -> None:
        """Give a transfer up; the caller detaches its peer, so that late bytes have nowhere to go."""
        if (flight := self._flights.get(transfer)) is not None:
            flight.cancelled = True

    def poll(self) -> Sequence[Ended]:
        """Look at every transfer in flight."""
        for number, flight in list(self._flights.items()):
            try:
                state = self._agent.check_xfer_state(flight.handle)
            except NIXL_ERRORS as exc:
                self._end(number, Outcome.FAILED, f"{type(exc).__name__}: {exc}")
                continue
            if state == "DONE":
                self._end(number, Outcome.MOVED, "")
            elif state == "ERR":
                self._end(number, Outcome.FAILED, "the read failed")
            elif flight.cancelled:
                self._release_cancelled(number, flight)
        ended, self._ended = self._ended, []
        return ended

    def _release_cancelled(self, number: TransferId, flight: _Flight) -> None:
        try:
            flight.handle.release()
        except NIXL_ERRORS:
            return  # NIXL is not done with it: keep it, and its blocks, until it is
        self._end(number, Outcome.FAILED, "cancelled")

    def _end(self, number: TransferId, outcome: Outcome, reason: str) -> None:
        flight = self._flights.pop(number)
        moved, count = 0, 0
        if outcome is Outcome.MOVED:
            with contextlib.suppress(*NIXL_ERRORS):  # no telemetry is no reason to fail a read
                telemetry = self._agent.get_xfer_telemetry(flight.handle)
                moved, count = int(telemetry.totalBytes), int(telemetry.descCount)
        with contextlib.suppress(*NIXL_ERRORS):  # NIXL keeps what it cannot release and tries again at its end
            flight.handle.release()
        self._ended.append(Ended(number, outcome, moved, count, time.monotonic() - flight.posted_at, reason))


def register(agent: Any, memory: str, device: int, spans: Sequence[tuple[int, int]]) -> bytes:
    """Register ``(address, bytes)`` spans of memory with NIXL and return the metadata peers need."""
    try:
        descriptors = agent.get_reg_descs([(base, size, device, "") for base, size in spans], memory)
        agent.register_memory(descriptors)
        metadata: bytes = agent.get_agent_metadata()
    except NIXL_ERRORS as exc:
        raise TransferError(f"NIXL cannot register the KV cache ({memory} of device {device}): {exc}") from exc
    return metadata


def _prepare(agent: Any, name: str, memory: str, device: int, regions: Sequence[Region]) -> Any:
    """Describe every block of every region, in the order :func:`xpyd_connector.core.plan.describe` counts them."""
    rows = [(region.base, region.length, device, region.stride, region.count) for region in regions]
    return agent.prep_xfer_dlist(name, np.array(rows, dtype=np.uint64), memory)
