"""NIXL, and the only file that imports it. Its exceptions stop here.

What nixl 1.5.1 with UCX does with a read that is given up (seen over TCP, 192 MiB, the peer stopped
in the middle): ``release`` succeeds at once, and so does removing the remote agent, but neither
stops the read. When the peer goes on, all of the rest lands in our memory, seconds or minutes
later. Closing is a flush there, and the endpoint lives as long as the agent (later versions know
``ucx_ep_close_force``). Once the remote agent is removed, NIXL does not even tell any more when the
read is over. And ending our agent in the middle of a read, which does stop it, aborts the *peer's*
process now and then (an assertion in UCX, the same as when a decode engine is killed in the middle
of a read).

So nothing is released or removed before NIXL says that it is over: done, or failed because the peer
is gone.
"""

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from pdrelay_connector.core.ids import XferId
from pdrelay_connector.core.layout.transfer_plan import Spans
from pdrelay_connector.core.messages import MemoryKind, RankInfo
from pdrelay_connector.core.ports import XferEnded, XferOutcome
from pdrelay_connector.core.session.data_plane import CUDA_IPC_READS
from pdrelay_connector.core.session.nixl_metadata import check_metadata
from pdrelay_connector.errors import BackendError, TransferError

_raises = logging.raiseExceptions
try:
    from nixl import _api as nixl_api
finally:
    # nixl/logging.py (1.5.1) sets it to False, once: log lines of the whole process that fail would
    # say nothing
    logging.raiseExceptions = _raises

_bindings = nixl_api.nixlBind
# What UCX finds in its environment, unless the operator has set it.
UCX_DEFAULTS: Mapping[str, str] = MappingProxyType({
    # A leak in its registration cache; vllm/distributed/nixl_utils.py sets the same.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Where UCX 1.23 sees no NVLink (PCIe alone, most virtual machines) it READs over TCP in place
    # of CUDA IPC: 0.4 GB/s instead of 152 (docs/benchmarks/connector.md#on-a-gpu). It WRITEs over
    # CUDA IPC anywhere.
    CUDA_IPC_READS: "on",
})  # fmt: skip
# Parameters of a backend whose memory goes away: UCX's registration cache would keep the pages, and
# so would a peer that has mapped them by CUDA IPC. vLLM's NixlConnector (0.33) starts UCX with the
# same; UCX_* variables prevail.
UNPINNED: Mapping[str, str] = MappingProxyType({"engine_config": "RCACHE_ENABLE=n,TLS=^cuda_ipc"})
HOST_MEMORY: MemoryKind = "DRAM"  # NIXL's name of it
LEAST_DELAY_US: Final = 100  # of a thread of ours, which needs Python's lock for each poll
# NIXL's exceptions have no common base but Exception: list what the library can raise.
NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for kind in vars(_bindings).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__name__.startswith("nixl")
)

# Those of a backend or a connection that is broken; the others are about what was asked.
BROKEN: tuple[type[Exception], ...] = (
    _bindings.nixlBackendError,
    _bindings.nixlRemoteDisconnectError,
    _bindings.nixlCancelledError,
    _bindings.nixlUnknownError,
)


def _kind_of(exc: Exception) -> type[TransferError]:
    return BackendError if isinstance(exc, BROKEN) else TransferError


def make_agent(
    name: str,
    *,
    progress_delay_us: int,
    backends: Mapping[str, Mapping[str, str]] = MappingProxyType({"UCX": {}}),
    bind: Callable[[], None] | None = None,
) -> Any:
    """Return a NIXL agent that a thread polls every ``progress_delay_us`` microseconds.

    ``bind``: makes the device of its memory current on the thread that calls it; None: the memory
    is the host's. NIXL's own thread has the context of no device, and UCX dies of that
    (``cuEventQuery``, ai-dynamo/nixl#2102). With a device NIXL has no thread, and one of ours polls
    that is bound.

    ``backends``: names, in the order of preference, and what their plugins are given. NIXL loads
    their libraries, and these read their environment, here and not before.

    nixl 1.5.1's Python agent fixes that delay at 0, which costs a whole core per agent, idle or
    not. The inner agent is replaced before any backend, and with it any thread, exists. STRICT: our
    thread and NIXL's both enter it.
    """
    strict = nixl_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = nixl_api.nixl_agent(name, nixl_api.nixl_agent_config(backends=[], sync_mode=strict))
    config = _bindings.nixlAgentConfig()
    config.useProgThread = bind is None
    config.syncMode = strict.value
    config.pthrDelay = progress_delay_us
    agent.agent = _bindings.nixlAgent(name, config)
    for variable, value in UCX_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    for backend, parameters in backends.items():
        if bind is not None and parameters.get("num_threads", "0") != "0":
            raise TransferError(
                f"backend {backend} is to have num_threads {parameters['num_threads']}: NIXL's own "
                f"threads do not know the device of the KV cache, and die of it"
            )
        try:
            agent.create_backend(backend, dict(parameters))
        except NIXL_ERRORS as exc:
            plugins = ", ".join(sorted(agent.get_plugin_list()))
            raise TransferError(
                f"NIXL cannot start its backend {backend} with {dict(parameters)}: {exc}; its "
                f"plugins are {plugins}, and "
                f"UCX_NET_DEVICES is {os.environ.get('UCX_NET_DEVICES', 'not set')}"
            ) from exc
    agent.is_bound = bind is not None
    if bind is not None:
        _start_progress(agent, bind, max(progress_delay_us, LEAST_DELAY_US) / 1e6)
    return agent


def _start_progress(agent: Any, bind: Callable[[], None], delay: float) -> None:
    """Poll an agent as long as it lives, on a thread of its own."""
    is_over = threading.Event()
    reference = weakref.ref(agent, lambda _: is_over.set())
    atexit.register(is_over.set)

    def poll() -> None:
        bind()
        while not is_over.wait(delay):
            if (living := reference()) is not None:
                # what is broken shows in the transfers themselves
                with contextlib.suppress(*NIXL_ERRORS):
                    living.get_new_notifs()
            del living

    threading.Thread(target=poll, name="pdrelay-progress", daemon=True).start()


@dataclass(slots=True)
class _NixlXfer:
    handle: Any
    remote: str
    posted_at: float
    bytes: int
    descriptors: int
    posting: float  # s spent in NIXL until it was on its way
    cancelled: bool = False


@dataclass(slots=True)
class _Remote:
    info: RankInfo
    leaving: bool = False  # removed as soon as nothing is in flight


class RemoteAgents:
    """The remote agents that a NIXL agent knows.

    NIXL knows each once. A worker that writes into a rank and reads from it has it removed when it
    does neither.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._infos: dict[str, RankInfo] = {}
        self._users: Counter[str] = Counter()

    def add(self, peer: RankInfo) -> str:
        """Load a rank's metadata, unless it is loaded; return the name of its agent.

        Raises ``TransferError``.
        """
        name = next(
            (name for name, info in self._infos.items() if info == peer), None
        ) or self._load(peer)
        self._infos[name] = peer
        self._users[name] += 1
        return name

    def _load(self, peer: RankInfo) -> str:
        try:
            check_metadata(peer.agent)
            name = self._agent.add_remote_agent(peer.agent)
        except NIXL_ERRORS as exc:
            raise _kind_of(exc)(f"NIXL cannot use the peer's metadata: {exc}") from exc
        name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        if name in self._infos:
            raise _attached(name)
        return name

    def remove(self, name: str) -> None:
        """End one use of a remote agent; the last one removes it."""
        self._users[name] -= 1
        if self._users[name]:
            return
        del self._users[name], self._infos[name]
        # the peer may be gone already: then there is nothing to close
        with contextlib.suppress(*NIXL_ERRORS):
            self._agent.remove_remote_agent(name)


def _attached(name: str) -> TransferError:
    return TransferError(
        f"NIXL agent {name} is attached already, to another engine or with other memory"
    )


class NixlTransferAgent:
    """Implements :class:`~pdrelay_connector.core.ports.TransferAgent`.

    One thread owns it after construction.

    Two of them on that thread may use one NIXL agent: they share ``remote_agents``.
    """

    def __init__(
        self, agent: Any, memory: str, device: int, remote_agents: RemoteAgents | None = None
    ) -> None:
        self._agent = agent
        self._remote_agents = remote_agents or RemoteAgents(agent)
        self._memory = memory
        self._device = device
        self._remotes: dict[str, _Remote] = {}
        self._numbers = map(XferId, itertools.count(1))
        self._xfers: dict[XferId, _NixlXfer] = {}
        self._ended: list[XferEnded] = []

    def attach(self, peer: RankInfo) -> str:
        """Load a remote rank's metadata; one that still leaves stays."""
        for name, remote in self._remotes.items():
            if remote.leaving and remote.info == peer:
                remote.leaving = False
                return name
        name = self._remote_agents.add(peer)
        if name in self._remotes:
            self._remote_agents.remove(name)
            raise _attached(name)
        self._remotes[name] = _Remote(peer)
        return name

    def detach(self, handle: str) -> None:
        """Forget a remote rank, as soon as nothing of it can reach our memory any more."""
        if (remote := self._remotes.get(handle)) is not None:
            remote.leaving = True
            self._remove_if_over(handle)

    def _remove_if_over(self, name: str) -> None:
        if not self._remotes[name].leaving or any(
            flight.remote == name for flight in self._xfers.values()
        ):
            return
        del self._remotes[name]
        self._remote_agents.remove(name)

    def read(self, handle: str, spans: Spans) -> XferId:
        """Post a READ."""
        return self._post("READ", handle, spans)

    def write(self, handle: str, spans: Spans) -> XferId:
        """Post a WRITE.

        UCX flushes the connection before NIXL calls it done: the bytes are in the peer by then.
        """
        return self._post("WRITE", handle, spans)

    def _post(self, operation: str, handle: str, spans: Spans) -> XferId:
        start = time.monotonic()
        theirs = self._remotes[handle].info
        try:
            xfer = self._agent.initialize_xfer(
                operation,
                self._describe(spans[:, 1], spans[:, 2], self._memory, self._device),
                self._describe(spans[:, 0], spans[:, 2], theirs.memory, theirs.device),
                handle,
            )
            state = self._agent.transfer(xfer)
        except NIXL_ERRORS as exc:
            raise _kind_of(exc)(f"NIXL cannot start a {operation}: {exc}") from exc
        number = next(self._numbers)
        posting = time.monotonic() - start
        self._xfers[number] = _NixlXfer(
            xfer, handle, start, int(spans[:, 2].sum()), len(spans), posting
        )
        if state == "ERR":
            self._end(number, XferOutcome.FAILED, f"the {operation} failed when it was posted")
        return number

    def _describe(self, addresses: Any, sizes: Any, memory: str, device: int) -> Any:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = sizes
        rows[:, 2] = device
        return self._agent.get_xfer_descs(rows, memory)

    def cancel(self, xfer: XferId) -> None:
        """Give a transfer up: it ends as failed, but only when NIXL reports its end."""
        if (flight := self._xfers.get(xfer)) is not None:
            flight.cancelled = True

    def poll(self) -> Sequence[XferEnded]:
        """Check every transfer in flight."""
        for number, flight in list(self._xfers.items()):
            try:
                state = self._agent.check_xfer_state(flight.handle)
            except NIXL_ERRORS as exc:
                self._end(number, XferOutcome.FAILED, f"{type(exc).__name__}: {exc}")
                continue
            if state == "DONE":
                self._end(
                    number,
                    XferOutcome.FAILED if flight.cancelled else XferOutcome.DONE,
                    "cancelled",
                )
            elif state == "ERR":
                self._end(number, XferOutcome.FAILED, "the transfer failed")
        ended = self._ended
        self._ended = []
        return ended

    def _end(self, number: XferId, outcome: XferOutcome, reason: str) -> None:
        flight = self._xfers.pop(number)
        moved, count = (flight.bytes, flight.descriptors) if outcome is XferOutcome.DONE else (0, 0)
        # NIXL keeps what it cannot release and tries again at its end
        with contextlib.suppress(*NIXL_ERRORS):
            flight.handle.release()
        seconds = time.monotonic() - flight.posted_at
        self._ended.append(
            XferEnded(number, outcome, moved, count, seconds, reason, flight.posting)
        )
        self._remove_if_over(flight.remote)


def register(agent: Any, memory: str, device: int, spans: Sequence[tuple[int, int]]) -> bytes:
    """Register ``(address, bytes)`` spans of memory with NIXL and return the metadata peers
    need.

    Raises ``TransferError``, also for memory of a device with an agent that was made for the
    host's.
    """
    if memory != HOST_MEMORY and not agent.is_bound:
        raise TransferError(f"memory of device {device} needs an agent that is bound to the device")
    try:
        descriptors = agent.get_reg_descs(
            [(base, size, device, "") for base, size in spans], memory
        )
        agent.register_memory(descriptors)
        metadata: bytes = agent.get_agent_metadata()
    except NIXL_ERRORS as exc:
        raise TransferError(
            f"NIXL cannot register the KV cache ({memory} of device {device}): {exc}"
        ) from exc
    return metadata


def unregister(agent: Any, memory: str, device: int, spans: Sequence[tuple[int, int]]) -> None:
    """Undo :func:`register`, with the same spans: the memory is about to go away."""
    try:
        agent.deregister_memory(
            agent.get_reg_descs([(base, size, device, "") for base, size in spans], memory)
        )
    except NIXL_ERRORS as exc:
        raise TransferError(
            f"NIXL cannot let go of the KV cache ({memory} of device {device}): {exc}"
        ) from exc
