"""The half in each vLLM worker: registers the cache, and passes loads to the transfer thread.

Everything here runs on the forward thread and only touches queues; NIXL is the transfer thread's.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from xpyd_connector.core.greeting import Guest
from xpyd_connector.core.ids import RequestId
from xpyd_connector.core.messages import Fingerprint, RankInfo
from xpyd_connector.core.peers import PeerBook
from xpyd_connector.core.reader import LetGo, Order, Reader, Result
from xpyd_connector.core.tally import Tally
from xpyd_connector.core.writer import Gone, Piece, Writer
from xpyd_connector.errors import ConnectorError
from xpyd_connector.io.link import SocketLink
from xpyd_connector.io.nixl import NixlMover, make_agent, register
from xpyd_connector.io.runner import Command, Runner
from xpyd_connector.settings import Mode
from xpyd_connector.shell.caches import describe_caches, place_of, spans_of
from xpyd_connector.shell.facts import Facts
from xpyd_connector.shell.metadata import LingeringMetadata, RankHandshake, StepMetadata
from xpyd_connector.shell.outbox import Outbox
from xpyd_connector.shell.stats import XpydStats

if TYPE_CHECKING:
    from xpyd_connector.settings import Settings

logger = init_logger("vllm.xpyd")

TOKEN_BYTES = 32
Ready: TypeAlias = Callable[[], bool]


class WorkerSide:
    """vLLM's worker hooks."""

    def __init__(self, facts: Facts, settings: "Settings", rank: int) -> None:
        self._facts = facts
        self._settings = settings
        self._rank = rank
        self._handshake: RankHandshake | None = None  # absent until the cache exists
        self._runner: Runner[Reader] | None = None  # only where KV is read
        self._writer: Runner[Writer] | None = None  # only where KV is written
        self._device: torch.device | None = None  # where the cache is, once it exists
        self._arrived: list[Result] = []
        self._outbox: Outbox[Result | LetGo] = Outbox()
        self._lingering = LingeringMetadata()  # news for the scheduler
        self._tally = Tally()
        self._loading: set[RequestId] = set()
        self._idle = False

    def register(self, caches: Mapping[str, torch.Tensor], fingerprint: Fingerprint) -> None:
        """Make the KV cache readable for peers, and start the transfer thread if this engine takes KV over."""
        regions = describe_caches(caches, self._facts.blocks)
        memory, device = place_of(caches)
        agent = make_agent(str(uuid.uuid4()), progress_delay_us=self._settings.progress_delay_us)
        metadata = register(agent, memory, device, spans_of(caches))
        own = RankInfo(self._rank, metadata, memory, device, regions)
        self._handshake = RankHandshake(own, fingerprint, os.urandom(TOKEN_BYTES))
        self._agent = agent  # who only lets others read or write does nothing more with it, but it must live
        self._device = next(iter(caches.values())).device
        logger.info(
            "xpyd: rank %d registered %d layers of %d blocks, %.3f GB of %s",
            self._rank, len(regions), self._facts.blocks, sum(r.length * r.count for r in regions) / 1e9, memory,
        )  # fmt: skip
        if self._settings.mode is Mode.PULL and self._facts.borrows:
            self._start_reader(NixlMover(agent, memory, device, regions), own, fingerprint)
        elif self._settings.mode is Mode.PUSH and self._facts.lends:
            self._start_writer(NixlMover(agent, memory, device, regions), own, self._handshake.token)

    def handshake(self) -> RankHandshake | None:
        """Return what peers must know of this rank."""
        return self._handshake

    def load(self, step: StepMetadata) -> None:
        """Pass this step's orders to the transfer thread."""
        self._idle = step.idle
        for order in step.orders:
            if self._runner is None:
                raise RuntimeError(f"request {order.request} is to be loaded on an engine that takes no KV over")
            self._loading.add(order.request)
            self._runner.post(_loading(order))
        self._arrived += step.arrived

    def offer(self, pieces: list[Piece | Gone]) -> None:
        """Let the transfer thread write what earlier steps have computed, once the device has."""
        if not pieces:
            return
        if self._writer is None:
            raise ConnectorError("KV is to be pushed by an engine that lends none")
        ready: Ready | None = None
        if self._device is not None and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()  # behind the kernels of the steps before this one
            ready = event.query
        for piece in pieces:
            self._writer.post(_offering(piece, ready))

    def results(self) -> KVConnectorTransferResults:
        """Return the loads that ended.

        A step that computes nothing while loads are under way waits a moment for one: vLLM would otherwise step
        at full speed, on the core that the transfer needs.
        """
        if self._loading and self._runner is not None:
            self._runner.check()
        if self._loading and self._idle and self._facts.steps_alone and not self._outbox:
            self._outbox.wait(self._settings.idle_wait)
        if self._writer is not None:
            self._writer.check()
        results = KVConnectorTransferResults()
        for ended in self._outbox.take():
            match ended:
                case LetGo(request):
                    self._lingering.let_go.append(request)
                case Result(request, _, lingers):
                    self._loading.discard(request)
                    _report(results, ended)
                    if lingers:
                        self._lingering.lingers.append(request)
        for result in self._arrived:
            _report(results, result)  # blocks that linger are the scheduler's own business here
        self._arrived = []
        return results

    def lingering(self) -> LingeringMetadata | None:
        """Return whose blocks must be kept from others, and whose no longer, since the last call."""
        news, self._lingering = self._lingering, LingeringMetadata()
        return news if news.lingers or news.let_go else None

    def stats(self) -> XpydStats | None:
        """Return the numbers since the last call."""
        report = self._outbox.take_report()
        return XpydStats.of(report) if report else None

    def stop(self) -> None:
        """End the transfer thread."""
        for runner in (self._runner, self._writer):
            if runner is not None:
                runner.stop()

    def _start_reader(self, mover: NixlMover, own: RankInfo, fingerprint: Fingerprint) -> None:
        settings, link = self._settings, self._link()
        peers = PeerBook(link, fingerprint, self._tally, retry_after=settings.retry_after)
        reader = Reader(
            link, mover, peers, self._tally, own, ranks=self._facts.ranks, timeout=settings.transfer_timeout
        )
        self._runner = Runner("xpyd-transfer", reader, link, self._after_turn)
        self._runner.start()

    def _start_writer(self, mover: NixlMover, own: RankInfo, token: bytes) -> None:
        link, timeout = self._link(), self._settings.transfer_timeout
        writer = Writer(link, mover, self._tally, own, home=self._facts.address, token=token, timeout=timeout)
        self._writer = Runner("xpyd-transfer", writer, link, lambda _: self._outbox.put((), self._tally.take()))
        self._writer.start()

    def _link(self) -> SocketLink:
        settings = self._settings
        return SocketLink(
            Guest(self._facts.engine, settings.secret),
            timeout=settings.handshake_timeout,
            threads=settings.handshake_threads,
        )

    def _after_turn(self, reader: Reader) -> None:
        """On the transfer thread: pass on what ended."""
        results = reader.take_results()
        for result in results:
            if isinstance(result, Result) and result.failure:
                logger.warning("xpyd: KV of %s was not loaded: %s", result.request, result.failure)
        self._outbox.put(results, self._tally.take())


def _report(results: KVConnectorTransferResults, ended: Result) -> None:
    results.finished_recving.add(str(ended.request))
    if ended.failure:
        results.failed_recving.add(str(ended.request))


def _loading(order: Order) -> Command[Reader]:
    return lambda reader, now: reader.load(order, now=now)


def _offering(piece: Piece | Gone, ready: Ready | None) -> Command[Writer]:
    return lambda writer, now: writer.offer(piece, now=now, ready=ready)
