"""Who gets into an engine's side channel, on real loopback sockets: encryption, proofs, limits."""

import contextlib
import os
import resource
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from pdrelay_connector.core.addresses import is_elsewhere
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEvent, LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import (
    PROTOCOL,
    Challenge,
    ReadDone,
    Refusal,
    RenewLeases,
    ServerProof,
    decode,
    encode,
)
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived
from pdrelay_connector.core.session.handshake import HandshakeServer, ProcessRole, ServerConnection, badge_of, hash_of
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io import client_connections, reloaded
from pdrelay_connector.io import link as link_module
from pdrelay_connector.io.framing import Deframer, frame
from pdrelay_connector.io.secrets import secrets_in_force
from pdrelay_connector.io.tls import Tls, digest_of
from pdrelay_connector.settings import Settings
from support.certificates import Authority
from support.key_updates import ASKING, QUIET, key_updates, traffic_secret
from support.side_channel import LONG, TLS, WELCOME, A, Net, P, dialled, in_force, serve_tls

pytestmark = pytest.mark.processes


OLD, NEW = b"the old secret of all", b"the new secret of all"


@pytest.fixture
def net():
    net = Net()
    with net.closing:
        yield net


def fails(net, link, address, engine=P):
    """Return why a meeting failed."""
    link.connect(address, engine)
    (failed,) = net.events(link)
    assert isinstance(failed, ConnectFailed), failed
    return failed.reason


# ---- encryption


def test_what_engines_say_cannot_be_read_on_the_way(net):
    """Names of requests, block numbers, NIXL's metadata: nothing of it travels in the clear."""
    d = net.link()
    p = net.listener()
    seen = []
    with forwarding(p.address, seen.append) as address:
        d.connect(address, P)
        net.events(d)

    assert b"".join(seen)
    # Long words only: two bytes are somewhere in any noise.
    assert not any(word in b"".join(seen) for word in (b"challenge", b"hello", b"scheduler", b"127.0.0.1"))


@contextlib.contextmanager
def forwarding(target, on_data=lambda data: None):
    """Pass the bytes of one connection on to another address, as they are."""
    server = socket.create_server(("127.0.0.1", 0))
    ends = []

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                on_data(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve():
        with contextlib.suppress(OSError):
            ends.append(server.accept()[0])
            ends.append(socket.create_connection(target))
            other = threading.Thread(target=pump, args=(ends[1], ends[0]))
            other.start()
            pump(ends[0], ends[1])
            other.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address(*server.getsockname())
    finally:
        server.shutdown(socket.SHUT_RDWR)
        for sock in ends:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        for sock in (server, *ends):
            sock.close()


def test_only_tls_1_3_is_spoken(net):
    """Older versions reveal the client's certificate, and allow weak ciphers."""
    p = net.listener()
    client = net.client(p.address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    sock = context.wrap_socket(client.raw, do_handshake_on_connect=False)
    sock.settimeout(LONG)
    is_over = threading.Event()

    def poll():
        while not is_over.is_set():
            net.idle(None, 0.02)

    poller = threading.Thread(target=poll)
    poller.start()
    with sock, pytest.raises(ssl.SSLError):
        sock.do_handshake()
    is_over.set()
    poller.join()

    assert p.counters.take_report().counters == {"connections_without_tls": 1}


def test_a_client_without_tls_receives_nothing(net):
    """Not even which service this is."""
    p = net.listener()
    client = net.client(p.address)
    client.raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    net.idle(None, 0.1)
    with contextlib.suppress(ConnectionError):
        assert b"pdrelay" not in client.raw.recv(1 << 16)

    assert p.counters.take_report().counters == {"connections_without_tls": 1}


# ---- proofs


def test_a_host_without_the_secret_is_refused_before_it_is_listened_to(net):
    """Its Welcome would have NIXL load its metadata."""
    with dialled(net) as (server, d), serve_tls(server) as conn:
        conn.sendall(frame(encode(Challenge(PROTOCOL, b"n" * 32))))
        conn.recv(1 << 16)
        conn.sendall(frame(encode(ServerProof(b"a guess"))) + frame(encode(WELCOME)))
        (failed,) = net.events(d)

    assert "does not prove the shared secret (PDRELAY_CONNECTOR_SECRET)" in failed.reason


def test_a_relay_cannot_reuse_a_clients_proof(net):
    """It ends TLS itself, and hands the real engine's challenge and the client's answer on."""
    p = net.listener()
    rogue = net.client(p.address)
    challenge = rogue.receive(net)
    certificate = Tls(TLS).contexts().certificate  # the one that the client sees: the rogue's
    assert certificate != digest_of(rogue.sock.getpeercert(binary_form=True))
    rogue.send(rogue.hello(net, challenge=challenge, certificate=certificate))

    assert "PDRELAY_CONNECTOR_SECRET" in rogue.receive(net).reason
    assert p.counters.take_report().counters == {"connections_refused": 1}


def test_bytes_that_are_passed_on_unread_are_refused_too(net):
    """The client dialled another address than the engine's own."""
    d = net.link()
    p = net.listener()
    with forwarding(p.address) as address:
        reason = fails(net, d, address)

    assert f"you dialled {address}" in reason
    assert "does not listen there" in reason


def test_a_refusal_cannot_forge_a_line_of_our_log(net):
    """Its text is a client's."""
    with dialled(net) as (server, d), serve_tls(server) as conn:
        conn.sendall(frame(encode(Refusal("no\nWARNING all is well\x1b[2J"))))
        (failed,) = net.events(d)

    assert failed.reason.isprintable()


class Lending:
    """An engine that lends to another one, whose scheduler renews and whose worker reads."""

    def __init__(self, net):
        self.link = net.listener()
        leases = LeaseTable(duration=30.0, extension=20.0, same_engine=self.link.are_of_one_engine)
        self.lease_manager = LeaseManager(self.link, leases, Counters())
        badge = badge_of(b"token")
        self.who = {"workers": (hash_of(badge),)}
        self.lease_manager.grant(A, now=0.0)
        self.d, self.worker = net.link(**self.who), net.link(role=ProcessRole.WORKER, badge=badge)
        self.own, self.its = net.connect(self.d, self.link), net.connect(self.worker, self.link)
        self.d.send(self.own, RenewLeases((A,)))
        for event in net.events(self.link):
            self.lease_manager.on(event, now=0.0)

    def handle_all(self):
        """Take in everything that is there, with one look."""
        time.sleep(0.1)
        seen = []
        for event in self.link.poll(0):
            seen.append(type(event))
            self.lease_manager.on(event, now=0.0)
        return seen

    def ended(self):
        return [why for _, why in self.lease_manager.take_released()]


def test_the_last_word_of_a_worker_that_leaves_counts(net):
    """Its connection has ended when the word is taken in, and was its own when it came."""
    p = Lending(net)
    p.worker.send(p.its, ReadDone(A, RequestId("d-a"), 0, 1))
    p.worker.close(p.its)

    assert p.handle_all() == [MessageReceived, ConnectionLost]
    assert p.ended() == [LeaseEvent.DONE]


def test_a_connection_is_known_until_its_end_is_taken_in(net):
    """Then its Hello is forgotten: engines come and go for ever."""
    p = Lending(net)
    holder = p.lease_manager.leases.holder(A)
    other = next(conn for conn in p.link._clients._hellos if conn != p.lease_manager.leases.holder(A))
    p.d.close(p.own)
    time.sleep(0.1)
    events = p.link.poll(0)
    assert p.link.are_of_one_engine(holder, other)
    assert [type(event) for event in events] == [ConnectionLost]
    assert not p.link.are_of_one_engine(holder, other)
    p.link.close(other)  # no event follows

    assert p.link._clients._hellos == {}


def test_an_engine_on_this_machine_is_met_where_nixl_is_on_loopback(net):
    """One that is elsewhere is refused at once: UCX would fail in the middle of a request, in words of its own."""
    assert net.connect(net.link(local_only=True), net.listener())
    assert not is_elsewhere("127.0.0.1", "127.0.0.1")
    assert not is_elsewhere("::ffff:10.0.0.1", "10.0.0.1")  # this machine, by an address of its own
    assert is_elsewhere("10.0.0.2", "10.0.0.1")


# ---- secrets and certificates in files


def test_secrets_are_read_again_when_their_file_changes(tmp_path, monkeypatch):
    """Rotation without a restart; what cannot be used changes nothing."""
    monkeypatch.setattr(reloaded, "LOOK_AGAIN", 0.0)
    path = tmp_path / "secret"
    path.write_bytes(OLD + b"\n")
    source = secrets_in_force(Settings(secret_file=str(path)))
    seen = [source()]
    for text in (NEW + b"\n" + OLD + b"\n", b"", b"short\n", b"\xff" * 20, NEW):
        other = tmp_path / "other"
        other.write_bytes(text)
        other.replace(path)
        seen.append(source())

    assert seen == [(OLD,), (NEW, OLD), (NEW, OLD), (NEW, OLD), (NEW, OLD), (NEW,)]


def test_secrets_are_read_again_when_only_the_owner_mode_or_content_of_their_file_has_changed(tmp_path, monkeypatch):
    """A file that could not be read gets its mode afterwards, and rsync sets the date of what it has written."""
    monkeypatch.setattr(reloaded, "LOOK_AGAIN", 0.0)
    path = tmp_path / "secret"
    path.write_bytes(OLD)
    date = path.stat().st_mtime_ns
    source = secrets_in_force(Settings(secret_file=str(path)))
    path.write_bytes(NEW)
    os.utime(path, ns=(date, date))

    assert len(OLD) == len(NEW)
    assert source() == (NEW,)


@pytest.mark.parametrize("text", [None, b"", b"short", b"x" * 5000, b"\xff" * 20])
def test_a_secret_file_that_cannot_be_used_stops_the_start(tmp_path, text):
    """Fail closed: an engine without its secret must not run as if there were none."""
    path = tmp_path / "secret"
    if text is not None:
        path.write_bytes(text)

    with pytest.raises(SettingsError, match="secret") as caught:
        secrets_in_force(Settings(secret_file=str(path)))
    assert isinstance(caught.value.__cause__, OSError | None)  # another may have the secret


def authority_in(folder):
    folder.mkdir()
    return Authority(folder, "ca")


def settings_of(authority, name):
    """Return settings with a certificate for a name, and this authority."""
    pair = authority.sign(name, f"DNS:{name}")
    files = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.own.cert}
    return Settings(**files, tls_server_name="engines.example")


def test_engines_with_certificates_of_one_authority_meet(net, tmp_path):
    """Operators who have a certificate authority need no secret."""
    authority = Authority(tmp_path, "ca")
    d = net.link(secret=b"", settings=settings_of(authority, "engines.example"))
    p = net.listener(secret=b"", settings=settings_of(authority, "engines.example"))

    assert net.connect(d, p)


def test_certificates_of_another_authority_are_refused_on_both_sides(net, tmp_path):
    """Each side checks the other."""
    ours, theirs = authority_in(tmp_path / "ours"), authority_in(tmp_path / "theirs")
    d = net.link(settings=settings_of(ours, "engines.example"))
    p = net.listener(settings=settings_of(theirs, "engines.example"))
    client = net.link()  # its certificate is nobody's

    assert "certificate" in fails(net, d, p.address)
    assert isinstance(fails(net, client, p.address), str)
    assert net.idle(p) == []


def test_a_certificate_for_another_name_is_refused(net, tmp_path):
    """Not everything that an authority has signed is an engine."""
    authority = Authority(tmp_path, "ca")
    d = net.link(settings=settings_of(authority, "engines.example"))
    p = net.listener(settings=settings_of(authority, "printer.example"))

    assert "is not accepted" in fails(net, d, p.address)


def test_the_longest_certificate_chain_is_within_the_record_limit(net, tmp_path):
    """OpenSSL takes 100 KiB of them; both sides show theirs before they have proven anything."""
    authority = Authority(tmp_path, "ca")
    settings = settings_of(authority, "engines.example")
    chain = Path(authority.own.cert).read_bytes()
    with Path(settings.tls_cert).open("ab") as file:
        file.write(chain * (95 * 1024 // len(ssl.PEM_cert_to_DER_cert(chain.decode()))))
    d = net.link(settings=settings)
    p = net.listener(settings=settings)

    assert net.connect(d, p)


def test_certificates_are_read_again_when_their_files_change(tmp_path, monkeypatch):
    """They are renewed every few weeks; engines run for months."""
    monkeypatch.setattr(reloaded, "LOOK_AGAIN", 0.0)
    authority = Authority(tmp_path, "ca")
    tls = Tls(settings_of(authority, "engines.example"))
    first = tls.contexts().certificate
    assert tls.contexts().certificate == first
    settings_of(authority, "engines.example")  # writes the same files anew
    second = tls.contexts().certificate
    (tmp_path / "engines.example.pem").write_text("nonsense")

    assert second != first
    assert tls.contexts().certificate == second


@pytest.mark.parametrize("key", ["tls_cert", "tls_ca"])
def test_certificates_that_cannot_be_used_stop_the_start(tmp_path, key):
    """In one sentence that names the file."""
    good = settings_of(Authority(tmp_path, "ca"), "engines.example")
    bad = tmp_path / "bad.pem"
    bad.write_text("nonsense")
    settings = {"tls_cert": good.tls_cert, "tls_key": good.tls_key, "tls_ca": good.tls_ca, key: str(bad)}

    with pytest.raises(SettingsError, match=r"bad\.pem"):
        Tls(Settings(**settings))


# ---- limits


def test_a_crowd_at_one_address_does_not_keep_out_another(net, monkeypatch):
    """An engine with the secret gets in during a flood of connections from one address."""
    monkeypatch.setattr(client_connections, "MAX_UNAUTHENTICATED", 6)
    p = net.listener()
    crowd = [net.client(p.address, source="127.0.0.2") for _ in range(20)]
    net.idle(None, 0.05)
    mine = net.client(p.address)
    mine.authenticate(net)

    assert len(crowd) == 20
    assert p.counters.take_report().counters["connections_evicted"] >= 14


def test_clients_of_one_engine_are_limited(net, monkeypatch):
    """An engine with the secret cannot use up the descriptors either; it receives a Refusal."""
    monkeypatch.setattr(client_connections, "MAX_CLIENTS_PER_ENGINE", 2)
    p = net.listener()
    for _ in range(2):
        net.client(p.address).authenticate(net, engine="d1")
    one_more, another = net.client(p.address), net.client(p.address)
    one_more.send(one_more.hello(net, engine="d1"))

    assert one_more.receive(net) == Refusal("2 connections are open here, 2 of them yours")
    another.authenticate(net, engine="d2")


def test_an_engine_that_says_nothing_for_long_is_closed_and_one_that_speaks_is_not(net):
    """Half of what it opened may be quiet: its workers speak at the end of a read only."""
    p = net.listener()
    quiet = net.client(p.address)
    busy = net.client(p.address)
    worker = net.client(p.address)
    quiet.authenticate(net, engine="quiet")
    busy.authenticate(net, engine="busy")
    worker.authenticate(net, engine="busy")
    busy.send(RenewLeases((A,)))
    for engine in p._clients._engines.values():
        engine.heard_at -= client_connections.IDLE_TIMEOUT
    lost = [event for event in net.idle(p, 0.2) if isinstance(event, ConnectionLost)]

    assert [("sent no message" in event.reason) for event in lost] == [True]
    assert quiet.receive(net) is None


def test_without_descriptors_it_waits_instead_of_burning_a_core(net, monkeypatch):
    """accept() would fail again at once, without end; this is the thread that renews all leases."""
    monkeypatch.setattr(link_module, "ACCEPT_PAUSE", LONG)
    p = net.listener()
    client = net.client(p.address)
    with no_more_descriptors():
        start = time.monotonic()
        turns = 0
        while time.monotonic() - start < 0.2:
            list(p.poll(0.2))
            turns += 1

    assert turns <= 3
    assert p.counters.take_report().counters == {"accepts_without_descriptor": 1}
    assert p._accept_at - start > LONG / 2
    p._accept_at = start
    client.authenticate(net)


@contextlib.contextmanager
def no_more_descriptors():
    """The system gives this process none that it does not have."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_several_messages_in_one_record_are_all_heard(net):
    """TLS decrypts more than is taken at once, and the selector does not know of the rest."""
    p = net.listener()
    client = net.client(p.address)
    client.authenticate(net)
    count = 5000
    client.sock.settimeout(LONG)
    writer = threading.Thread(target=client.send, args=[RenewLeases((A,))] * count)
    writer.start()
    events = net.events(p, lambda events: len(events) == count, seconds=30)
    writer.join()

    assert events == [MessageReceived(events[0].conn, RenewLeases((A,)))] * count


# ---- key updates: 27 bytes that cost 40 us each, of which OpenSSL takes in all that have come within one call

MANY = 80_000  # key updates, 2 MiB: more than a second's work
SOON = 0.5  # s of this process's work: a busy machine takes longer for it


@contextlib.contextmanager
def pouring(sock, records):
    """Send records past the TLS of a socket, until it is closed at the other end or all are sent."""

    def pour():
        with contextlib.suppress(OSError):
            socket.socket.sendall(sock, records)

    thread = threading.Thread(target=pour)
    thread.start()
    time.sleep(0.05)  # the system's buffers are full
    try:
        yield thread
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_endless_key_updates_before_authentication_close_only_that_connection(net, tmp_path):
    """The thread that reads them renews all leases."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    client = net.client(p.address, keylog=tmp_path / "keys")
    assert isinstance(client.receive(net), Challenge)
    with pouring(client.sock, key_updates(traffic_secret(tmp_path / "keys", "CLIENT_TRAFFIC_SECRET_0"), MANY)):
        start = time.thread_time()
        d.send(conn, RenewLeases((A,)))
        (heard,) = net.events(p)
        took = time.thread_time() - start

    assert heard.message == RenewLeases((A,))
    assert took < SOON
    assert p.counters.take_report().counters == {"connections_over_record_limit": 1}


@pytest.mark.parametrize("message", [QUIET, ASKING])
def test_an_engine_that_updates_its_key_without_end_does_not_keep_others_from_being_heard(net, tmp_path, message):
    """It may, for it has proven that it is one of us, but others have their turn in between."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    mad = net.client(p.address, keylog=tmp_path / "keys")
    mad.authenticate(net)
    secret = traffic_secret(tmp_path / "keys", "CLIENT_TRAFFIC_SECRET_0")
    with pouring(mad.sock, key_updates(secret, MANY, message, before=1)):
        start = time.thread_time()
        d.send(conn, RenewLeases((A,)))
        (heard,) = net.events(p)
        took = time.thread_time() - start

    assert heard.message == RenewLeases((A,))
    assert took < SOON
    assert p.counters.take_report().counters == {}


def test_what_tls_itself_answers_to_an_engine_that_does_not_read_is_bounded(net, tmp_path, monkeypatch):
    """Each key update may ask for one of ours."""
    monkeypatch.setattr(link_module, "MAX_UNSENT", 1 << 15)
    p = net.listener()
    mad = net.client(p.address, keylog=tmp_path / "keys")
    mad.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    mad.authenticate(net)
    (found,) = p._conns.values()
    found.tls.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    secret = traffic_secret(tmp_path / "keys", "CLIENT_TRAFFIC_SECRET_0")
    with pouring(mad.sock, key_updates(secret, 10_000, ASKING, before=1)):
        (lost,) = net.events(p)

    assert "unread" in lost.reason
    assert lost.silent


def test_half_a_key_update_does_not_have_us_spin(net, tmp_path):
    """While OpenSSL waits for the other half it encrypts nothing: what is to be sent waits for words, not for room."""
    p = net.listener()
    mad = net.client(p.address, keylog=tmp_path / "keys")
    mad.authenticate(net)
    (found,) = p._conns.values()
    secret = traffic_secret(tmp_path / "keys", "CLIENT_TRAFFIC_SECRET_0")
    socket.socket.sendall(mad.sock, key_updates(secret, 1, QUIET[:4], before=1))
    net.idle(None, 0.05)
    p.send(found.id, RenewLeases((A,)))
    start = time.monotonic()
    turns = 0
    while time.monotonic() - start < 0.2:
        list(p.poll(0.2))
        turns += 1
    socket.socket.sendall(mad.sock, key_updates(secret, 1, QUIET[4:], before=2))

    assert turns <= 3
    assert mad.receive(net) == RenewLeases((A,))


def test_a_host_that_updates_its_key_without_end_is_given_up(net, tmp_path):
    """Pool threads are few, and those who cannot be met otherwise wait for one.

    To make so many records takes this process a second, and a busy machine more than the usual limit of a handshake.
    """
    with dialled(net, timeout=LONG) as (server, d), serve_tls(server, keylog=tmp_path / "keys") as host:
        records = key_updates(traffic_secret(tmp_path / "keys", "SERVER_TRAFFIC_SECRET_0"), MANY)
        with pouring(host, records):
            start = time.process_time()
            (failed,) = net.events(d)
            took = time.process_time() - start

    assert "and no proof" in failed.reason
    assert took < SOON


def test_a_host_with_the_secret_that_updates_its_key_without_end_is_given_up_in_time(net, tmp_path):
    """It sends key updates in place of its Welcome."""
    tls = Tls(TLS)
    nonce = b"n" * 32
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        d = net.link(timeout=4.0)  # a busy machine needs some of it for the handshake
        d.connect(address, P)
        with serve_tls(server, tls, tmp_path / "keys") as host:
            host.sendall(frame(encode(Challenge(PROTOCOL, nonce))))
            (hello,) = (decode(message) for message in Deframer(1 << 16).feed(host.recv(1 << 16)))
            arrival = ServerConnection(address, tls.contexts().certificate, nonce)
            host.sendall(
                frame(encode(HandshakeServer(WELCOME, in_force(b"s"), "127.0.0.1").answer(hello, arrival).proof))
            )
            secret = traffic_secret(tmp_path / "keys", "SERVER_TRAFFIC_SECRET_0")
            with pouring(host, key_updates(secret, 2 * MANY, ASKING, before=2)):
                start = time.monotonic()
                (failed,) = net.events(d)
                took = time.monotonic() - start

    assert "timed out" in failed.reason
    assert took < LONG / 2
