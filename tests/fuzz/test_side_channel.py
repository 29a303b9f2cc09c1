"""Bytes and messages that no engine sends, at a real side channel: nothing ends its thread, grows, or keeps others out.

``PDRELAY_FUZZ_SECONDS`` (5) is how long each of the two modes takes, ``PDRELAY_FUZZ_SEED`` (17) where it begins.
"""

import contextlib
import gc
import os
import random
import socket
import ssl
import time

import msgspec
import psutil
import pytest

from pdrelay_connector.core import messages
from pdrelay_connector.core.control import ControlPlane
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId, PartId, RequestId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.lease_table import LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import MAX_FRAME, PROTOCOL, LentBlocks, Welcome, encode
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.session.handshake import HandshakeClient, HandshakeServer
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator
from pdrelay_connector.core.staging.slots import Slots
from pdrelay_connector.errors import PeerError
from pdrelay_connector.io.connect import open_connection
from pdrelay_connector.io.framing import frame
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.runner import Runner
from pdrelay_connector.io.tls import Tls
from support.engines import FINGERPRINT, rank_info
from support.side_channel import TLS, P, in_force

SECONDS = float(os.environ.get("PDRELAY_FUZZ_SECONDS") or "5")
SEED = os.environ.get("PDRELAY_FUZZ_SEED") or "17"
SECRET = b"a secret of the fuzzer"
GROWTH = 16 << 20  # bytes that the process may be larger at the end than after its first seconds
pytestmark = [
    pytest.mark.edges,
    pytest.mark.timeout(SECONDS * 2 + 60),
    pytest.mark.slow,
]  # it takes all the time that it is given


class Engine:
    """The control thread of an engine that lends, and its side channel; nothing of vLLM."""

    def __init__(self, mode):
        counters = Counters()
        self.link = SocketLink(HandshakeClient(P, in_force(SECRET)), Tls(TLS), counters, timeout=1.0, threads=1)
        welcome = Welcome(PROTOCOL, P, FINGERPRINT, (rank_info("p0"),))
        self.address = self.link.listen(
            Address("127.0.0.1", 0), HandshakeServer(welcome, in_force(SECRET), "127.0.0.1")
        )
        peers = PeerTable(self.link, FINGERPRINT, counters, retry_after=1.0)
        self.leases = LeaseTable(duration=30.0, extension=20.0)
        lease_manager = LeaseManager(self.link, self.leases, counters)
        lease_renewer = LeaseRenewer(self.link, peers, counters, heartbeat_interval=5.0)
        tokens = {0: b"token"}
        push_coordinator = push_receiver = staging_coordinator = None
        if mode == "push":
            push_coordinator = PushCoordinator(
                self.link, lease_manager, counters, tokens=tokens, registration_timeout=5.0
            )
            push_receiver = PushReceiver(
                self.link, peers, lease_renewer, counters, (rank_info("p0"),), timeout=5.0, peer_timeout=1.0
            )
        else:
            workers = WorkerLinks(self.link, tokens)
            slots = Slots[PartId]([8])
            staging_coordinator = StagingCoordinator(
                self.link, lease_manager, counters, workers, slots, blocks=64, read_timeout=5.0
            )
        control = ControlPlane(
            lease_manager, lease_renewer, peers, counters, push_coordinator=push_coordinator,
            push_receiver=push_receiver, staging_coordinator=staging_coordinator,
        )  # fmt: skip
        self.counters = {}
        self.runner = Runner("fuzzed", control, self.link, self._after_turn)

    def _after_turn(self, control):
        for name, by in control.counters.take_report().counters.items():
            self.counters[name] = self.counters.get(name, 0) + by
        control.take_results(now=time.monotonic())

    def grant(self, name):
        self.runner.post(lambda control, now: control.lease_manager.holds(name) or control.grant(name, now=now))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_whatever_comes_the_side_channel_serves_engines(mode):
    """Strangers and engines gone mad: the thread lives, memory and descriptors stay, and an engine is met in time."""
    chance = random.Random(f"{SEED} {mode}")
    print(f"seed {SEED}")
    engine = Engine(mode)
    process = psutil.Process()
    engine.runner.start()
    try:
        end = time.monotonic() + SECONDS
        base = None
        rounds = 0
        while time.monotonic() < end:
            engine.grant(RequestId("a"))
            chance.choice([raw, tls_only, strange, mad])(chance, engine.address)
            rounds += 1
            if rounds % 20 == 0:
                engine.runner.check()
                greet(engine.address).close()
            if base is None and time.monotonic() > end - SECONDS * 0.8:
                base = settled(engine, process)
        engine.runner.check()
        after = settled(engine, process)
    finally:
        engine.runner.stop()

    assert rounds > SECONDS
    assert after[0] <= base[0] + GROWTH, f"{rounds} rounds of seed {SEED}: {base} {after}"
    assert after[1] <= base[1] + 4, f"{rounds} rounds of seed {SEED}: {base} {after}"
    assert engine.counters["connections_refused"] > 0
    assert engine.counters["connections_without_tls"] > 0


def settled(engine, process):
    """Return what the process holds once nobody is connected: bytes, descriptors."""
    end = time.monotonic() + 10
    while engine.link._conns and time.monotonic() < end:
        time.sleep(0.05)
    assert not engine.link._conns
    gc.collect()
    return process.memory_info().rss, process.num_fds()


def greet(address, engine="d0"):
    """Be met as an engine is."""
    return open_connection(address, P, HandshakeClient(EngineId(engine), in_force(SECRET)), Tls(TLS), timeout=10.0)[0]


# ---- what is sent


def raw(chance, address):
    """Bytes to the bare port: noise, HTTP, half a ClientHello, nothing."""
    with socket.create_connection(address, 5.0) as sock, contextlib.suppress(OSError):
        for _ in range(chance.randint(0, 4)):
            sock.sendall(
                chance.choice([b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", b"\x00\x00\x00\x04", b"\xff" * 64])
                + chance.randbytes(chance.choice([0, 1, 5, 300]))
            )


def tls_only(chance, address):
    """TLS, and then noise in place of a Hello."""
    with tls(address) as sock, contextlib.suppress(OSError):
        sock.sendall(
            chance.choice([frame(chance.randbytes(chance.randint(0, 200))), chance.randbytes(20), lengths(chance)])
        )
        if chance.random() < 0.5:
            sock.recv(1 << 16)


@contextlib.contextmanager
def tls(address):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sock = socket.create_connection(address, 5.0)
    try:
        sock = context.wrap_socket(sock)
    except OSError:
        sock.close()
        yield sock
        return
    with sock:
        yield sock


def strange(chance, address):
    """Messages, right in their form, of somebody who has proven nothing."""
    with tls(address) as sock, contextlib.suppress(OSError):
        sock.sendall(b"".join(frame(mutated(chance, encode(message(chance)))) for _ in range(chance.randint(1, 5))))
        if chance.random() < 0.5:
            sock.recv(1 << 16)


def mad(chance, address):
    """Somebody who knows the secret, and sends messages of all kinds in any order, whole and altered."""
    try:
        sock = greet(address, chance.choice(["d0", "d1", "p0"]))
    except PeerError:
        return
    with contextlib.closing(sock), contextlib.suppress(OSError):
        for _ in range(chance.randint(1, 30)):
            data = encode(message(chance))
            sock.write(frame(mutated(chance, data) if chance.random() < 0.3 else data))
            while sock.wants_write:
                sock.send()
        sock.sock.settimeout(0.02)
        sock.recv()


def lengths(chance):
    return chance.choice([0, 1, MAX_FRAME, MAX_FRAME + 1, 0xFFFFFFFF]).to_bytes(4, "little") + b"x"


def mutated(chance, data):
    """Alter some bytes, cut, or repeat a part."""
    data = bytearray(data)
    for _ in range(chance.choice([0, 1, 1, 3, 10])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.2:
        del data[chance.randrange(len(data)) :]
    if chance.random() < 0.1:
        data += data[: chance.randrange(len(data) + 1)]
    return bytes(data)


KINDS = [kind for kind in messages.Message.__args__ if kind is not messages.Welcome]


def message(chance):
    """Any message of the protocol, with values of the right types and often at their limits."""
    kind = chance.choice(KINDS)
    return kind(**{field.name: value(chance, field.name, field.type) for field in msgspec.structs.fields(kind)})


def value(chance, name, type_):  # noqa: C901 (a table)
    names = [RequestId(text) for text in ("a", "b", "mine", "", "\U0001f600" * 255)]
    number = chance.choice([0, 1, 2, 7, 1023])
    match name:
        case "requests" | "readers":
            return tuple(chance.choices(names, k=chance.choice([0, 1, 3, 1024])))
        case "groups" if "Lent" in str(type_):
            return tuple(
                LentBlocks(0, number, tuple(range(1, 1 + chance.randint(0, 9))))
                for _ in range(chance.choice([1, 1, 2]))
            )
        case "groups" | "blocks" | "slots":
            return (tuple(range(1, 1 + chance.randint(0, 9))),) * chance.choice([1, 1, 2])
        case "rank" if "RankInfo" in str(type_):
            return rank_info("d0", rank=chance.choice([0, 1]), ranks=chance.choice([1, 2]))
        case "register":
            return messages.RegisterPush(names[0], names[1], "digest", (LentBlocks(0, 4, (1,)),))
        case "rank" | "peer" | "number" | "part":
            return number
        case "ranks":
            return chance.choice([1, 2, 1024])
        case "protocol":
            return chance.choice([PROTOCOL, 3, -1])
        case "port":
            return 5600
        case "role":
            return "scheduler"
        case "proofs" | "workers":
            return (chance.randbytes(32),) * chance.choice([0, 1, 2])
        case "proof" | "nonce" | "token" | "badge" | "content":
            return chance.choice([b"", b"token", chance.randbytes(32)])
        case "held" | "leases_lost" | "unpacks":
            return chance.random() < 0.5
        case _:
            return chance.choice(["a", "b", "mine", "x"])
