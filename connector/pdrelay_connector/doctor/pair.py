"""The two ends of an examination, over real sockets and NIXL: one waits, the other dials."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from pdrelay_connector.core.addresses import is_loopback, is_wildcard
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.doctor.examination import DialBack
from pdrelay_connector.core.doctor.examiner import Examiner, Plan
from pdrelay_connector.core.doctor.pair_facts import PairFacts
from pdrelay_connector.core.doctor.respondent import RESPONDENT, Respondent
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint, Welcome
from pdrelay_connector.core.session.data_plane import DEVICES_VARIABLE, choose_devices
from pdrelay_connector.core.session.handshake import HandshakeClient, HandshakeServer, Secrets
from pdrelay_connector.doctor.machine import read_machine
from pdrelay_connector.doctor.ucx import ucx_log
from pdrelay_connector.errors import PeerError, SettingsError
from pdrelay_connector.io.connect import open_connection
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.network_interfaces import own_address, read_network_interfaces
from pdrelay_connector.io.secrets import secrets_in_force
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.settings import Settings

# s between two looks at NIXL, so that what an earlier partner left is cleared
LONGEST_WAIT: Final = 0.2
NO_MODEL: Final = Fingerprint("", "", "", 0, 0, 0, "", "")


@dataclass(frozen=True, slots=True)
class Request:
    """The order to one end."""

    settings: Settings
    address: Address  # to listen at, or to dial
    memory_bytes: int
    device: str
    model: Fingerprint | None
    wall: Callable[[], float]  # s since the epoch


@dataclass(frozen=True, slots=True)
class Examine:
    """The further order to the dialling end."""

    block_bytes: int
    seconds: float
    timeout: float
    own_host: str  # where the other end reaches this one; "": the address that leads to it
    back_port: int  # for the connection back; 0: the system chooses


def listen(request: Request, *, once: bool, say: Callable[[str], None]) -> None:
    """Wait for examiners, one at a time; return after the first if ``once``.

    Raises :exc:`~pdrelay_connector.errors.ConnectorError` if this cannot begin.
    """
    settings = request.settings
    host = request.address.host
    if is_wildcard(host):
        raise SettingsError(
            f"--host is {host!r}; name one address of this machine, so that UCX listens nowhere "
            f"else"
        )
    secrets = secrets_in_force(settings)
    check_open(host, secrets(), settings)
    own = own_address(host, request.address.port)
    bind_devices(own, settings)
    with ucx_log() as log, _link(settings, RESPONDENT, secrets) as link:
        from pdrelay_connector.doctor.scratch import open_scratch  # noqa: PLC0415 (NIXL reads its environment at import)

        facts = read_machine(own, os.environ)
        scratch, facts = open_scratch(
            str(uuid.uuid4()), request.memory_bytes, request.device, settings, facts
        )
        welcome = Welcome(PROTOCOL, RESPONDENT, request.model or NO_MODEL, (scratch.info,))
        bound = link.listen(request.address, HandshakeServer(welcome, secrets, host))
        respondent = Respondent(
            link, scratch.agent, scratch.info, facts, transports=log.transports, say=say
        )
        reach = own if is_loopback(own) else host
        say(
            f"listening on {bound}; on the other machine run: pdrelay doctor "
            f"{Address(reach, bound.port)}"
        )
        due: float | None = 0.0
        while not (once and respondent.visits):
            for event in link.poll(_wait(due)):
                respondent.on(event, now=time.monotonic(), wall=request.wall())
            due = respondent.advance(now=time.monotonic())


def examine(request: Request, order: Examine) -> PairFacts:
    """Examine the other end, and return what was found out.

    Raises :exc:`~pdrelay_connector.errors.ConnectorError` if this cannot begin.
    """
    settings = request.settings
    address = request.address
    secrets = secrets_in_force(settings)
    engine = EngineId(f"{RESPONDENT}-{uuid.uuid4()}")
    own = order.own_host or _way_to(address)
    facts = PairFacts(
        address=str(address), here=read_machine(own, os.environ), model_here=request.model
    )
    facts.connect_failure = _first_look(address, engine, secrets, settings)
    if facts.connect_failure:
        return facts
    bind_devices(own, settings)
    with ucx_log() as log, _link(settings, engine, secrets) as link:
        from pdrelay_connector.doctor.scratch import open_scratch  # noqa: PLC0415 (NIXL reads its environment at import)

        facts.here = read_machine(own, os.environ)  # again: with the devices that were chosen
        scratch, facts.here = open_scratch(
            str(uuid.uuid4()), request.memory_bytes, request.device, settings, facts.here
        )
        back = link.listen(
            Address(own, order.back_port),
            HandshakeServer(Welcome(PROTOCOL, engine, NO_MODEL, (scratch.info,)), secrets, own),
        )
        facts.back_address = str(back)
        plan = Plan(
            order.block_bytes, order.seconds, order.timeout, DialBack(own, back.port, engine)
        )
        examiner = Examiner(
            link, scratch.agent, scratch.info, facts, plan, transports=log.transports
        )
        examiner.start(address, now=time.monotonic())
        due: float | None = 0.0
        while not examiner.is_done:
            for event in link.poll(_wait(due)):
                examiner.on(event, now=time.monotonic(), wall=request.wall())
            due = examiner.advance(now=time.monotonic(), wall=request.wall())
    return facts


def check_open(host: str, secrets: tuple[bytes, ...], settings: Settings) -> None:
    """Raise :exc:`~pdrelay_connector.errors.SettingsError`: reachable without a secret."""
    if secrets or settings.tls_ca or is_loopback(own_address(host, 1)):
        return
    raise SettingsError(
        f"--host is {host!r}, which other machines may reach, and there is no secret; name the "
        "engines' with --secret-file or PDRELAY_CONNECTOR_SECRET_FILE"
    )


def bind_devices(own: str, settings: Settings) -> None:
    """Have UCX use the devices that an engine at this address would use."""
    devices = choose_devices(
        own,
        lambda: read_network_interfaces(own, 1),
        os.environ.get(DEVICES_VARIABLE),
        [backend.name for backend in settings.backends],
        allow_open=settings.allow_open_data_plane,
    )
    if devices is not None:
        os.environ[DEVICES_VARIABLE] = devices


def _way_to(address: Address) -> str:
    try:
        return own_address(*address)
    except SettingsError:  # no way there, or no such name: connecting says which
        return "127.0.0.1"


def _first_look(address: Address, engine: EngineId, secrets: Secrets, settings: Settings) -> str:
    """Connect and hang up, before anything costs time; return why it failed."""
    client = HandshakeClient(engine, secrets)
    try:
        encrypted, _ = open_connection(
            address, RESPONDENT, client, Tls(settings), timeout=settings.handshake_timeout
        )
    except PeerError as exc:
        return str(exc)
    encrypted.close()
    return ""


@contextlib.contextmanager
def _link(settings: Settings, engine: EngineId, secrets: Secrets) -> Generator[SocketLink]:
    client = HandshakeClient(engine, secrets)
    link = SocketLink(
        client, Tls(settings), Counters(), timeout=settings.handshake_timeout, threads=2
    )
    try:
        yield link
    finally:
        link.stop()


def _wait(due: float | None) -> float:
    """Return how long to wait for events (s)."""
    return LONGEST_WAIT if due is None else max(0.0, min(LONGEST_WAIT, due - time.monotonic()))
