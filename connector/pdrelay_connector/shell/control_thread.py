"""The control thread of a scheduler process: builds its objects, and passes commands to it."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from vllm.logger import init_logger

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLender
from pdrelay_connector.core.cached_prefix.prefill_scheduler import PrefixFinder
from pdrelay_connector.core.control import ControlPlane, ControlResult
from pdrelay_connector.core.counters import Counters, StatsReport
from pdrelay_connector.core.ids import EngineId, PartId, RequestId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.lease_table import LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint, Reachable, Welcome
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.session.handshake import (
    HandshakeServer,
    ProcessRole,
    Secrets,
    badge_of,
    hash_of,
)
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.decode_scheduler import StagingReceiver
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator
from pdrelay_connector.core.staging.slots import Slots
from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.runner import Command, Runner
from pdrelay_connector.settings import Mode
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.metadata import RankHandshake
from pdrelay_connector.shell.network import open_link, reach_remarks
from pdrelay_connector.shell.outbox import Outbox
from pdrelay_connector.shell.prefix_hashes import prefix_hasher
from pdrelay_connector.shell.timeline_notes import are_wanted

if TYPE_CHECKING:
    from pdrelay_connector.settings import Settings

logger = init_logger("vllm.pdrelay")

Handshakes: TypeAlias = Mapping[int, RankHandshake]  # by worker
ControlCommand: TypeAlias = Command[ControlPlane]
Post: TypeAlias = Callable[[ControlCommand], None]  # ControlThread.post


class ControlThread:
    """Runs a :class:`~pdrelay_connector.core.control.ControlPlane`.

    Its methods belong to the engine thread.

    ``on_news`` is called on the control thread when there are results. ``has_loop``: that wakes an
    engine which sleeps.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: "Settings",
        secrets: Secrets,
        *,
        on_news: Callable[[], None],
        has_loop: bool,
        clock: Callable[[], float],
    ) -> None:
        self._engine_config = engine_config
        self._settings = settings
        self._secrets = secrets
        self._clock = clock
        self._has_loop = has_loop
        self._last_turn = clock()  # the last iteration of vLLM's loop; the control thread reads it
        self._has_warned = False  # that leases are not renewed
        self._runner: Runner[ControlPlane] | None = None  # absent before start()
        # commands while the engine sleeps
        self._kept_commands: list[ControlCommand] | None = None
        self._outbox: Outbox[ControlResult] = Outbox(on_news=on_news)

    def start(self, handshakes: Handshakes, fingerprint: Fingerprint, engine: EngineId) -> None:
        """Start the thread as ``engine``, and listen if engines or our own workers connect to it.

        After a sleep it replaces the one before.
        """
        self.stop()
        settings = self._settings
        engine_config = self._engine_config
        ranks = tuple(handshake.rank for handshake in _ordered(handshakes))
        welcome = Welcome(PROTOCOL, engine, fingerprint, ranks, settings.kv_lease_duration)
        counters = Counters(are_wanted())
        workers = tuple(hash_of(badge_of(handshake.token)) for handshake in handshakes.values())
        link = open_link(
            settings,
            engine,
            counters,
            role=ProcessRole.SCHEDULER,
            workers=workers,
            secrets=self._secrets,
        )
        receives_staged_pushes = (
            engine_config.is_consumer and engine_config.staging_blocks and settings.mode.pushes
        )  # then its own workers connect
        if engine_config.is_producer or receives_staged_pushes:
            link.listen(
                engine_config.address,
                HandshakeServer(welcome, self._secrets, engine_config.address.host),
            )
            logger.info("pdrelay: engine %s listens on %s", engine, engine_config.address)
        for remark in reach_remarks(settings) if engine_config.is_consumer else ():
            logger.info("pdrelay: %s", remark)
        control = _build_control_plane(
            engine_config,
            settings,
            link,
            counters,
            handshakes,
            fingerprint=fingerprint,
            last_turn=lambda: self._last_turn,
            has_numbers=lambda: self._has_loop and (self._outbox.has_report or counters.has_any),
        )
        self._run(Runner("pdrelay-control", control, link, self._after_turn))

    def _run(self, runner: Runner[ControlPlane]) -> None:
        self._runner = runner
        runner.start()
        commands = self._kept_commands or ()
        self._kept_commands = None
        for command in commands:
            runner.post(command)

    def keep_commands(self) -> None:
        """Keep the commands of a sleeping engine for the next thread."""
        self._kept_commands = []

    def stop(self) -> None:
        """End the thread and close the listener."""
        if self._runner is not None:
            self._runner.stop()

    def post(self, command: ControlCommand) -> None:
        """Run a command on the thread; raises ``ConnectorError`` if it has died."""
        if self._runner is None:
            raise RuntimeError(
                "vLLM scheduled a request before it passed the workers' handshake metadata"
            )
        if self._kept_commands is not None:
            self._kept_commands.append(command)
        else:
            self._runner.post(command)

    def check(self) -> None:
        """Raise :exc:`~pdrelay_connector.errors.ConnectorError` if the thread has died."""
        if self._runner is not None:
            self._runner.check()

    def note_turn(self) -> None:
        """Note an iteration of vLLM's engine loop.

        Without one for engine_loop_timeout, the leases of waiting requests are not renewed.
        """
        self._last_turn = self._clock()

    @property
    def has_results(self) -> bool:
        """Whether :meth:`take_results` would return any."""
        return bool(self._outbox)

    def wait_for_results(self, seconds: float) -> None:
        """Wait for results, at most so long."""
        self._outbox.wait(seconds)

    def take_results(self) -> Sequence[ControlResult]:
        """Return the results since the last call."""
        return self._outbox.take_items()

    def take_report(self) -> StatsReport:
        """Return the numbers since the last call."""
        return self._outbox.take_report()

    def _after_turn(self, control: ControlPlane) -> None:
        """Pass the results on; called on the control thread after each iteration."""
        if control.lease_renewer.is_withholding != self._has_warned:
            self._has_warned = control.lease_renewer.is_withholding
            if self._has_warned:
                logger.warning(
                    "pdrelay: the engine's loop has not turned for %g s: "
                    "the leases of waiting requests are not renewed",
                    self._settings.engine_loop_timeout,
                )
            else:
                logger.info("pdrelay: the engine's loop turns again: leases are renewed")
        for engine, reason in control.lease_manager.take_objections():
            text = (
                "pdrelay: engine %s loads no KV of this engine and computes its prompts itself; "
                "of this engine it says: %s"
            )
            logger.warning(text, engine, reason)
        self._outbox.put(control.take_results(now=self._clock()), control.counters.take_report())


def common_fingerprint(handshakes: Handshakes) -> Fingerprint:
    """Return the fingerprint of all workers; raises ``UnsupportedCache`` if they differ."""
    fingerprints = {handshake.fingerprint for handshake in handshakes.values()}
    if len(fingerprints) > 1:
        attention = " and ".join(sorted(fingerprint.attention for fingerprint in fingerprints))
        raise UnsupportedCache(
            f"pipeline stages with different attention backends ({attention}) are not supported"
        )
    return fingerprints.pop()


def _ordered(handshakes: Handshakes) -> list[RankHandshake]:
    return [handshakes[rank] for rank in sorted(handshakes)]


def _build_control_plane(
    engine_config: EngineConfig,
    settings: "Settings",
    link: SocketLink,
    counters: Counters,
    handshakes: Handshakes,
    *,
    fingerprint: Fingerprint,
    last_turn: Callable[[], float],
    has_numbers: Callable[[], bool] = lambda: False,
) -> ControlPlane:
    landing = [handshake.landing for handshake in _ordered(handshakes)]
    peers = PeerTable(link, fingerprint, counters, retry_after=settings.retry_after, ranks=landing)
    leases = LeaseTable(
        duration=settings.kv_lease_duration,
        extension=settings.lease_extension,
        reading=settings.transfer_timeout,
        same_engine=link.are_of_one_engine,
    )
    lease_manager = LeaseManager(link, leases, counters, sums_timeout=settings.sums_timeout)
    lease_renewer = LeaseRenewer(
        link,
        peers,
        counters,
        heartbeat_interval=settings.heartbeat_interval,
        loop_timeout=settings.engine_loop_timeout or inf,
        last_turn=last_turn,
        tells_pulled=settings.mode is Mode.AUTO,
    )
    finder = None
    lender = None
    if engine_config.prefix_hash:
        finder = PrefixFinder(link, peers, counters, timeout=settings.return_timeout)
        lender = _prefix_lender(engine_config, link, lease_manager, counters)
    tokens = {rank: handshake.token for rank, handshake in handshakes.items()}
    slots = (
        [engine_config.staging_blocks] * len(engine_config.groups)
        if engine_config.staging_blocks
        else None
    )
    if settings.mode is Mode.PULL:
        staging_coordinator = None
        if slots is not None and engine_config.is_producer:
            staging_coordinator = StagingCoordinator(
                link,
                lease_manager,
                counters,
                WorkerLinks(link, tokens),
                Slots[PartId](slots),
                blocks=engine_config.blocks,
                read_timeout=2 * settings.transfer_timeout,
            )
        return ControlPlane(
            lease_manager,
            lease_renewer,
            peers,
            counters,
            staging_coordinator=staging_coordinator,
            prefix_finder=finder,
            prefix_lender=lender,
            has_numbers=has_numbers,
            close_all=link.close_all,
        )
    staging_receiver = None
    if slots is not None and engine_config.is_consumer:
        staging_receiver = StagingReceiver(
            link, counters, WorkerLinks(link, tokens), Slots[RequestId](slots)
        )
    push_coordinator = PushCoordinator(
        link,
        lease_manager,
        counters,
        tokens=tokens,
        registration_timeout=settings.registration_timeout,
    )
    push_receiver = PushReceiver(
        link,
        peers,
        lease_renewer,
        counters,
        tuple(handshake.landing for handshake in _ordered(handshakes)),
        timeout=settings.registration_timeout,
        peer_timeout=settings.peer_timeout,
        contention_timeout=settings.transfer_timeout,
        staging_receiver=staging_receiver,
    )
    return ControlPlane(
        lease_manager,
        lease_renewer,
        peers,
        counters,
        push_coordinator=push_coordinator,
        push_receiver=push_receiver,
        staging_receiver=staging_receiver,
        prefix_finder=finder,
        prefix_lender=lender,
        takes_reads=settings.mode.pulls,
        has_numbers=has_numbers,
        close_all=link.close_all,
    )


def _prefix_lender(
    engine_config: EngineConfig, link: SocketLink, lease_manager: LeaseManager, counters: Counters
) -> PrefixLender:
    hash_blocks = prefix_hasher(engine_config.prefix_hash, engine_config.groups[0].block_size)
    return PrefixLender(
        link, lease_manager, counters, Reachable(*engine_config.address), hash_blocks
    )
