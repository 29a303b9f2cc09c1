"""Builds what runs beside the requests: what finds engines, looks at them, turns their roles, tells other routers."""

import random
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial

from pdrelay_proxy.building.discovery import build_discovery, build_shared_text
from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.building.requests import RequestSide
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.model import EngineRole, InstanceId, Role
from pdrelay_proxy.core.roles.role_controller import RoleController, RoleLimits
from pdrelay_proxy.core.roles.work_meter import RoleTargets
from pdrelay_proxy.io.discovery.reconciler import Discovery
from pdrelay_proxy.io.discovery.role_turns import LeasedTurns
from pdrelay_proxy.io.peers import RouterPeers, peers_of
from pdrelay_proxy.io.probes.engine_metrics_watch import EngineMetricsWatch
from pdrelay_proxy.io.probes.kv_events import KvEventFollower
from pdrelay_proxy.io.probes.prober import Prober
from pdrelay_proxy.io.probes.role_board import RoleBoard
from pdrelay_proxy.io.probes.role_watch import RoleWatch
from pdrelay_proxy.io.status import Status
from pdrelay_proxy.settings import RolesMode, Settings


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """What runs beside the requests, and what it shows."""

    discovery: Discovery
    status: Status
    running: Callable[[], Sequence[AbstractAsyncContextManager[object]]]  # anew for each start; the first begins first


def build_background(
    settings: Settings,
    engines: EngineSide,
    serving: RequestSide,
    *,
    peer_socket: socket.socket | None,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> BackgroundWork:
    """Build it. ``wall``: seconds of a clock that hosts have in common. Raises ConfigError.

    ``peer_socket``: bound where other routers reach this one; None: the settings name the port.
    """
    registry = engines.registry
    telemetry = serving.telemetry
    admission = serving.gate.admission
    peers = _peers(settings, engines, serving, peer_socket)
    prober = Prober(
        registry,
        engines.checks,
        settings,
        clock,
        random.random,
        give_up=engines.wire.give_up,
        looks=peers[0].looks if peers else None,
        warnings=engines.warnings,
    )
    every_s = settings.engine_metrics_interval_s
    metrics_watch = EngineMetricsWatch(registry, engines.checks.metrics, telemetry, every_s=every_s, clock=clock)
    followers = _followers(engines, serving)
    discovery = build_discovery(settings, registry, clock)
    spans = () if serving.engine_spans is None else (serving.engine_spans,)
    board = _role_board(settings, serving, clock)
    status = Status(
        telemetry,
        registry,
        admission,
        clock,
        may_be_alone=lambda: serving.requests.services.settings.current.decode_only_fallback,
        pairs=engines.pairs,
        roles=(lambda: None) if board is None else board.part,
        warnings=engines.warnings,
    )
    deciding = _deciding(settings, board, engines, discovery, admission=admission, clock=clock, wall=wall)

    def running() -> Sequence[AbstractAsyncContextManager[object]]:
        return (
            *[each.running() for each in spans],
            discovery.running(),
            prober.running(),
            metrics_watch.running(),
            *[each.running() for each in followers],
            *[each() for each in deciding],
            *[each.running() for each in peers],
        )

    return BackgroundWork(discovery, status, running)


def _peers(
    settings: Settings, engines: EngineSide, serving: RequestSide, peer_socket: socket.socket | None
) -> Sequence[RouterPeers]:
    """Return what the fleet's other routers are told by and heard with; none, if there are no others."""
    queue, counters = serving.gate.admission, serving.telemetry.counters
    peers = peers_of(settings, engines.registry, queue, serving.keyring, counters, peer_socket=peer_socket)
    if peers is None:
        return ()
    engines.fleet.tell_load_changes(peers.changed)
    return (peers,)


def _followers(engines: EngineSide, serving: RequestSide) -> Sequence[KvEventFollower]:
    """Return what asks engines what they have cached; none, if no policy goes by it."""
    if engines.index is None:
        return ()
    counters = serving.telemetry.counters
    follower = KvEventFollower(
        engines.registry, engines.checks, engines.index, counters, random.random, known=engines.known
    )
    return (follower,)


def _role_board(settings: Settings, serving: RequestSide, clock: Callable[[], float]) -> RoleBoard | None:
    """Return what shows decisions on roles; None: this router makes none."""
    if settings.roles is RolesMode.OFF:
        return None
    return RoleBoard(settings.roles, serving.telemetry.counters, settings.turns_per_hour, clock)


def _deciding(
    settings: Settings,
    board: RoleBoard | None,
    engines: EngineSide,
    discovery: Discovery,
    *,
    admission: Admission,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Sequence[Callable[[], AbstractAsyncContextManager[object]]]:
    """Return what decides on roles, for a board."""
    if board is None or settings.target_ttft_s is None or settings.target_itl_s is None:
        return ()
    targets = RoleTargets(settings.target_ttft_s, settings.target_itl_s, slots=settings.decode_slots)
    limits = RoleLimits(settings.min_prefill, settings.min_decode, turns_per_hour=settings.turns_per_hour)
    turns, text = None, None
    if settings.roles is RolesMode.AUTO:
        me, text = f"{socket.gethostname()}-{secrets.token_hex(4)}", build_shared_text(settings)

        async def turn(name: InstanceId, role: Role) -> None:
            await discovery.turn(name, EngineRole(role.value))

        turns = LeasedTurns(me, text, turn, clock=clock, wall=wall)

    watch = RoleWatch(
        engines.registry,
        engines.checks.metrics,
        RoleController(targets, limits),
        board,
        queued=lambda: admission.waiting,
        every_s=settings.roles_interval_s,
        clock=clock,
        turns=turns,
    )
    opened = () if text is None else (partial(aclosing, text),)
    return (*opened, watch.running)
