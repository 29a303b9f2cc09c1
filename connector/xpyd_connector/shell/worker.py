"""The half in each vLLM worker: registers the cache, and passes loads to the transfer thread.

Everything here runs on the forward thread and only touches queues; NIXL is the transfer thread's.
"""

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from xpyd_connector.core.greeting import Guest
from xpyd_connector.core.ids import RequestId
from xpyd_connector.core.messages import Fingerprint, RankInfo
from xpyd_connector.core.peers import PeerBook
from xpyd_connector.core.reader import LetGo, Order, Reader, Result
from xpyd_connector.core.tally import Tally
from xpyd_connector.io.link import SocketLink
from xpyd_connector.io.nixl import NixlMover, make_agent, register
from xpyd_connector.io.runner import Command, Runner
from xpyd_connector.shell.caches import describe_caches, place_of, spans_of
from xpyd_connector.shell.facts import Facts
from xpyd_connector.shell.metadata import LingeringMetadata, RankHandshake, StepMetadata
from xpyd_connector.shell.outbox import Outbox
from xpyd_connector.shell.stats import XpydStats

if TYPE_CHECKING:
    from xpyd_connector.settings import Settings

logger = init_logger("vllm.xpyd")


class WorkerSide:
    """vLLM's worker hooks."""

    def __init__(self, facts: Facts, settings: "Settings", rank: int) -> None:
        self._facts = facts
        self._settings = settings
        self._rank = rank
        self._handshake: RankHandshake | None = None  # absent until the cache exists
        self._runner: Runner[Reader] | None = None  # only where KV is taken over
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
        self._handshake = RankHandshake(own, fingerprint)
        self._agent = agent  # a prefill worker does nothing more with it, but it must live as long as the cache
        logger.info(
            "xpyd: rank %d registered %d layers of %d blocks, %.3f GB of %s",
            self._rank, len(regions), self._facts.blocks, sum(r.length * r.count for r in regions) / 1e9, memory,
        )  # fmt: skip
        if self._facts.borrows:
            self._start(NixlMover(agent, memory, device, regions), own, fingerprint)

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

    def results(self) -> KVConnectorTransferResults:
        """Return the loads that ended.

        A step that computes nothing while loads are under way waits a moment for one: vLLM would otherwise step
        at full speed, on the core that the transfer needs.
        """
        if self._loading and self._runner is not None:
            self._runner.check()
        if self._loading and self._idle and not self._outbox:
            self._outbox.wait(self._settings.idle_wait)
        results = KVConnectorTransferResults()
        for ended in self._outbox.take():
            match ended:
                case LetGo(request):
                    self._lingering.let_go.append(request)
                case Result(request, failure, lingers):
                    self._loading.discard(request)
                    results.finished_recving.add(str(request))
                    if failure:
                        results.failed_recving.add(str(request))
                    if lingers:
                        self._lingering.lingers.append(request)
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
        if self._runner is not None:
            self._runner.stop()

    def _start(self, mover: NixlMover, own: RankInfo, fingerprint: Fingerprint) -> None:
        settings = self._settings
        link = SocketLink(
            Guest(self._facts.engine, settings.secret),
            timeout=settings.handshake_timeout,
            threads=settings.handshake_threads,
        )
        peers = PeerBook(link, fingerprint, self._tally, retry_after=settings.retry_after)
        reader = Reader(
            link, mover, peers, self._tally, own, ranks=self._facts.ranks, timeout=settings.transfer_timeout
        )
        self._runner = Runner("xpyd-transfer", reader, link, self._after_turn)
        self._runner.start()

    def _after_turn(self, reader: Reader) -> None:
        """On the transfer thread: pass on what ended."""
        results = reader.take_results()
        for result in results:
            if isinstance(result, Result) and result.failure:
                logger.warning("xpyd: KV of %s was not loaded: %s", result.request, result.failure)
        self._outbox.put(results, self._tally.take())


def _loading(order: Order) -> Command[Reader]:
    return lambda reader, now: reader.load(order, now=now)
