"""Control connections on real loopback sockets."""

import contextlib
import errno
import gc
import socket
import struct
import threading
import time
import weakref
from pathlib import Path

import pytest

from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.messages import (
    MAX_FRAME,
    MAX_UNAUTHENTICATED_FRAME,
    PROTOCOL,
    Challenge,
    DropLeases,
    Hello,
    Refusal,
    RenewLeases,
    encode,
)
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.session.handshake import HandshakeServer
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io import client_connections, connection
from pdrelay_connector.io import link as link_module
from pdrelay_connector.io.framing import frame
from support.engines import changed, rank_info
from support.side_channel import LONG, NO_NONCE, WELCOME, A, Net, P, SlowServer, dialled, in_force, serve_tls

pytestmark = pytest.mark.edges


@pytest.fixture
def net():
    net = Net()
    with net.closing:
        yield net


def of(kind):
    return lambda events: any(isinstance(event, kind) for event in events)


def test_two_links_meet_and_talk_both_ways(net):
    """The main path."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    d.send(conn, RenewLeases((A,)))
    (renewed,) = net.events(p)
    p.send(renewed.conn, DropLeases((A,)))
    (answered,) = net.events(d)

    assert renewed.message == RenewLeases((A,))
    assert answered == MessageReceived(conn, DropLeases((A,)))


def test_order_is_kept(net):
    """A Done after its heartbeat, not before."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    sent = [RenewLeases((RequestId(str(number)),)) for number in range(200)]
    for message in sent:
        d.send(conn, message)
    events = net.events(p, lambda events: len(events) == 200)

    assert [event.message for event in events] == sent


def test_each_end_hears_once_that_the_other_closed(net):
    """The end that closes gets no event."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    d.send(conn, RenewLeases((A,)))
    net.events(p)
    d.close(conn)
    d.close(conn)
    events = net.events(p)

    assert [type(event) for event in [*events, *net.idle(p)]] == [ConnectionLost]
    assert net.idle(d) == []


def test_nothing_is_heard_of_a_connection_that_was_closed_meanwhile(net):
    """Several messages may arrive at once; the first one may be reason enough to close."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    for _ in range(3):
        d.send(conn, RenewLeases((A,)))
    time.sleep(0.1)
    seen = []
    for event in p.poll(1.0):
        seen.append(event)
        p.close(event.conn)

    assert len(seen) == 1
    assert net.idle(p) == []


def test_sending_to_a_closed_connection_is_ignored(net):
    """Its ConnectionLost is handled, or the caller closed it itself."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    d.close(conn)
    d.send(conn, RenewLeases((A,)))

    assert net.idle(d) == []


@pytest.mark.parametrize(("ours", "theirs"), [(b"", b"s"), (b"s", b""), (b"s", b"t")])
def test_another_secret_is_refused_with_the_reason(net, ours, theirs):
    """On the client's side; the listener has no event."""
    d = net.link(secret=ours)
    p = net.listener(secret=theirs)
    conn = d.connect(p.address, P)
    (failed,) = net.events(d)

    assert failed.conn == conn
    assert "PDRELAY_CONNECTOR_SECRET" in failed.reason
    assert (failed.is_incompatible, failed.cause) == (True, "secret")
    assert net.idle(p) == []


def test_messages_of_a_refused_client_are_ignored(net):
    """Sent together with the Hello: they could free or keep blocks of other requests."""
    p = net.listener()
    client = net.client(p.address)
    client.send(client.hello(net, secret=b"wrong"), DropLeases((A,)), RenewLeases((A,)), raw_hello())

    assert net.idle(p) == []


def raw_hello():
    return Hello(PROTOCOL, EngineId("x"), "scheduler", P, "127.0.0.1", 1, "127.0.0.1", NO_NONCE, ())


def test_messages_may_follow_the_hello_at_once(net):
    """The first heartbeat need not wait for the Welcome."""
    p = net.listener()
    client = net.client(p.address)
    client.send(client.hello(net), RenewLeases((A,)))

    assert [event.message for event in net.events(p)] == [RenewLeases((A,))]


def test_nothing_is_heard_after_a_connection_was_lost(net, monkeypatch):
    """The welcome finds the peer gone, and its next message is already here: it must not claim a lease."""
    p = net.listener()
    client = net.client(p.address)
    hello = client.hello(net)
    monkeypatch.setattr(link_module, "MAX_UNSENT", -1)  # whatever is sent now finds that too much is unread
    client.send(hello, RenewLeases((A,)))

    assert [type(event) for event in net.events(p)] == [ConnectionLost]


def test_a_refused_client_receives_the_reason_and_is_closed(net):
    """An older engine's operator reads it."""
    p = net.listener()
    client = net.client(p.address)
    client.send(changed(client.hello(net), protocol=PROTOCOL + 1))

    assert isinstance(client.receive(net), Refusal)
    assert client.receive(net) is None


def test_a_silent_client_is_closed_in_time(net):
    """A port scanner, or half a handshake: no event follows, and a waiting poll() wakes for the deadline."""
    p = net.listener()
    client = net.client(p.address)
    assert isinstance(client.receive(net), Challenge)
    (conn,) = p._conns.values()
    start = time.monotonic()
    conn.hello_by = start + 0.15
    assert list(p.poll(LONG)) == []
    waited = time.monotonic() - start

    assert 0.15 <= waited < LONG / 2
    assert client.receive(net) is None


@pytest.mark.parametrize("limit", ["MAX_UNAUTHENTICATED", "MAX_UNAUTHENTICATED_PER_ADDRESS"])
def test_unauthenticated_connections_are_limited(net, monkeypatch, limit):
    """They cannot use up the descriptors, nor one address the room of others: the oldest goes, so others connect."""
    monkeypatch.setattr(client_connections, limit, 3)
    p = net.listener()
    clients = [net.client(p.address) for _ in range(5)]
    evicted = 0
    while evicted < 2:  # all five are in
        net.idle(p, 0.01)
        evicted += p.counters.take_report().counters.get("connections_evicted", 0)

    assert [type(client.receive(net)) for client in clients] == [type(None)] * 2 + [Challenge] * 3


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_UNAUTHENTICATED_FRAME + 1),
        struct.pack("<I", 0),
        frame(b"\x81\xa4type\xa1\xff"),
        frame(b"GET / HTTP/1.1"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_an_invalid_first_message_closes_only_that_connection(net, data):
    """The thread that renews all leases goes on."""
    p = net.listener()
    d = net.link()
    client = net.client(p.address)
    client.receive(net)
    client.sock.sendall(data)

    assert client.receive(net) is None
    assert net.connect(d, p)


@pytest.mark.parametrize("data", [struct.pack("<I", MAX_FRAME + 1), frame(b"\xc1"), frame(b"\x81\xa4type\xa1\xff")])
def test_a_peer_that_breaks_the_protocol_is_lost(net, data):
    """With the reason."""
    p = net.listener()
    client = net.client(p.address)
    client.send(client.hello(net))
    client.receive(net)
    client.sock.sendall(data)
    (lost,) = net.events(p)

    assert isinstance(lost, ConnectionLost)
    assert "allowed" in lost.reason or "protocol" in lost.reason


def test_a_peer_that_does_not_read_is_lost(net, monkeypatch):
    """What we keep for it is bounded."""
    monkeypatch.setattr(link_module, "MAX_UNSENT", 1 << 20)
    p = net.listener()
    client = net.client(p.address)
    client.send(client.hello(net), RenewLeases((A,)))
    (met,) = net.events(p)
    drop = DropLeases(tuple(RequestId("x" * 200) for _ in range(1000)))
    for _ in range(100):
        p.send(met.conn, drop)
    (lost,) = net.events(p)

    assert "unread" in lost.reason
    assert net.idle(p) == []


def test_a_message_larger_than_the_sockets_buffer_arrives(net):
    """It is sent in pieces, without blocking."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    large = DropLeases(tuple(RequestId(f"{number:0200}") for number in range(1000)))
    for _ in range(30):
        d.send(conn, large)
    events = net.events(p, lambda events: len(events) == 30)

    assert all(event.message == large for event in events)


def test_a_welcome_larger_than_what_a_peer_may_leave_unread_arrives(net):
    """NIXL's metadata of many ranks and devices."""
    huge = changed(WELCOME, ranks=(changed(rank_info("p0"), agent=b"x" * (link_module.MAX_UNSENT + 1)),))
    d = net.link()
    p = net.listener(welcome=huge)
    conn = d.connect(p.address, P)

    assert net.events(d) == [PeerConnected(conn, huge)]


def test_a_port_without_a_listener_fails(net):
    """With the address in the sentence."""
    with socket.socket() as silent:  # bound and not listening: refuses, and no other test can get its port
        silent.bind(("127.0.0.1", 0))
        address = Address(*silent.getsockname())
        d = net.link()
        conn = d.connect(address, P)
        (failed,) = net.events(d)

    assert failed.conn == conn
    assert failed.reason.startswith(f"cannot connect to {address}: ")
    assert failed.has_ended


def test_a_failure_keeps_nothing_of_its_caller(net):
    """An engine that sleeps drops a rank with its registered memory then, not when Python collects garbage."""

    class Rank:
        pass

    def poll_as_a_rank():
        rank = Rank()
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            link = net.link()
            link.connect(Address(*silent.getsockname()), P)
            net.events(link)
        return weakref.ref(rank)

    gc.disable()
    try:
        assert poll_as_a_rank()() is None
    finally:
        gc.enable()


def test_a_peer_that_has_reset_a_connection_may_be_elsewhere():
    """What is said of engines of one machine holds for no other."""
    with socket.socket() as ended:
        assert link_module._leads_elsewhere(ended)


def test_an_engine_that_takes_the_place_of_the_expected_one_says_so(net):
    """Decode engines then know that the one before has ended."""
    p = net.listener()
    d = net.link()
    d.connect(p.address, EngineId("before"))
    (failed,) = net.events(d)

    assert "engine before does not answer here (any more)" in failed.reason
    assert (failed.is_incompatible, failed.has_ended) == (True, True)


def test_a_name_with_two_addresses_has_a_closed_port_if_both_have(net, monkeypatch):
    """One that does not answer may be the engine's, which lives."""
    with socket.socket() as closed, socket.socket() as other:
        for each in (closed, other):
            each.bind(("127.0.0.1", 0))
        entries = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (closed, other)]
        unreachable = (*entries[0][:4], ("255.255.255.255", 1))
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *_, **__: {"both": entries}.get(host, [unreachable, *entries])
        )
        d = net.link()
        ended = {}
        for host in ("both", "one"):
            d.connect(Address(host, 1), P)
            ended[host] = net.events(d)[0].has_ended

    assert ended == {"both": True, "one": False}


@contextlib.contextmanager
def silent_port():
    """The address of a listener that is full: Linux drops what comes to it."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()


def test_the_time_to_connect_is_shared_by_the_addresses_of_a_name(net, monkeypatch):
    """One that is silent leaves time for the next, and many occupy a thread no longer than one does."""
    p = net.listener()
    with silent_port() as silent:
        places = {"many": [silent] * 40, p.address.host: [silent, p.address]}
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places[host]],
        )
        d = net.link(timeout=2.0)
        d.connect(Address("many", 1), P)
        (failed,) = net.events(d)
        assert "timed out" in failed.reason
        d.connect(p.address, P)
        (met,) = net.events(d)

    assert isinstance(met, PeerConnected)


@pytest.mark.parametrize("host", ["x" * 64 + ".example", "nul\0byte", "a..b", ""])
def test_a_name_that_cannot_be_a_hosts_fails(net, host, monkeypatch):
    """Offers come from elsewhere: a name must not end the thread. (An empty one is this machine.)"""
    monkeypatch.setattr(socket, "getaddrinfo", refuse_names(socket.getaddrinfo))
    d = net.link()
    d.connect(Address(host, 1), P)
    (failed,) = net.events(d)

    assert isinstance(failed, ConnectFailed)
    assert "cannot connect" in failed.reason


def refuse_names(resolve):
    """Resolve as the system does, short of asking a server."""

    def getaddrinfo(host, *args, **options):
        resolve(host, *args, **{**options, "flags": socket.AI_NUMERICHOST})

    return getaddrinfo


def test_something_else_on_that_port_fails(net):
    """For example a web server."""
    with dialled(net) as (server, d):
        conn, _ = server.accept()
        with conn:
            conn.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            (failed,) = net.events(d)

    assert isinstance(failed, ConnectFailed)
    assert "does not accept our TLS 1.3" in failed.reason


def test_something_else_behind_tls_fails(net):
    """The same, encrypted."""
    with dialled(net) as (server, d), serve_tls(server) as conn:
        conn.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        (failed,) = net.events(d)

    assert "allowed" in failed.reason


@pytest.mark.parametrize("said", [DropLeases((A,)), RenewLeases((A,)), Refusal("full")])
def test_something_else_than_a_challenge_fails(net, said):
    """A refusal is passed on."""
    with dialled(net) as (server, d), serve_tls(server) as conn:
        conn.sendall(frame(encode(said)))
        (failed,) = net.events(d)

    assert "full" in failed.reason or f"answered the handshake with {type(said).__name__}" in failed.reason


def test_an_engine_of_another_protocol_is_not_the_one_that_was_met(net):
    """A revision that takes the place of another one."""
    with dialled(net) as (server, d), serve_tls(server) as conn:
        conn.sendall(frame(encode(Challenge(PROTOCOL + 1, NO_NONCE))))
        (failed,) = net.events(d)

    assert f"it speaks protocol {PROTOCOL + 1}" in failed.reason
    assert (failed.is_incompatible, failed.has_ended) == (True, True)


def test_a_listener_that_never_answers_fails_in_time(net):
    """A stopped engine's kernel still accepts connections."""
    start = time.monotonic()
    with dialled(net, timeout=0.2) as (_, d):
        (failed,) = net.events(d)

    assert 0.15 < time.monotonic() - start < LONG / 2
    assert failed.reason.startswith("no handshake with ")
    assert failed.reason.endswith(": timed out")
    assert not failed.has_ended


def test_a_listener_that_answers_byte_by_byte_fails_in_time(net):
    """Each byte is in time, but all of them are not: it must not keep the pool from the others."""
    start = time.monotonic()
    events = []
    with dialled(net, timeout=0.3) as (server, d):
        # On a busy machine its time may be over before TLS is complete.
        with contextlib.suppress(OSError), serve_tls(server) as conn:
            drip = frame(encode(WELCOME))
            while not events and time.monotonic() - start < LONG / 2:
                conn.send(drip[:1])
                drip = drip[1:]
                events += d.poll(0.05)
        events = events or net.events(d)

    assert time.monotonic() - start < LONG / 2
    assert "timed out" in events[0].reason


def test_a_listener_that_hangs_up_fails(net):
    """It restarts, or has too many clients."""
    with dialled(net) as (server, d):
        server.accept()[0].close()
        (failed,) = net.events(d)

    assert "closed the connection" in failed.reason


def test_a_cancelled_attempt_is_not_reported(net):
    """And its connection is closed when it succeeds after all."""
    p = net.listener(server=SlowServer)
    d = net.link()
    conn = d.connect(p.address, P)
    d.close(conn)
    net.idle(d, 0.6)

    assert net.idle(d) == []
    assert d._conns == {}


def test_slow_listeners_are_met_at_the_same_time(net):
    """Eight new prefill engines, each of which answers when all have been asked."""
    d = net.link()
    running = threading.Event()
    all_asked = threading.Barrier(8, timeout=LONG / 2)

    class Waits(HandshakeServer):
        def answer(self, message, arrival):
            all_asked.wait()
            return super().answer(message, arrival)

    listeners = [net.listener(server=Waits) for _ in range(8)]
    net.links = [d]
    threads = [threading.Thread(target=serve, args=(listener, running)) for listener in listeners]
    for thread in threads:
        thread.start()
    conns = [d.connect(listener.address, P) for listener in listeners]
    events = net.events(d, lambda events: len(events) == 8)
    running.set()
    for thread in threads:
        thread.join()

    assert {event.conn for event in events} == set(conns)
    assert {type(event) for event in events} == {PeerConnected}


def serve(listener, stop):
    while not stop.is_set():
        list(listener.poll(0.02))


def test_wake_ends_a_wait_from_another_thread(net):
    """How the engine's commands reach a sleeping thread."""
    d = net.link()
    timer = threading.Timer(0.1, d.wake)
    timer.start()
    start = time.monotonic()
    assert list(d.poll(LONG)) == []
    waited = time.monotonic() - start
    timer.join()

    assert waited < LONG / 2
    assert list(d.poll(0)) == []


def test_waking_never_blocks(net):
    """Not even 5,000 times without a poll(), nor after stop()."""
    d = net.link()
    for _ in range(5000):
        d.wake()
    start = time.monotonic()
    list(d.poll(LONG))
    assert time.monotonic() - start < LONG / 2
    net.stop(d)
    d.wake()


def test_a_reset_connection_is_lost_not_an_error(net):
    """RST instead of FIN, while something is being sent."""
    p = net.listener()
    client = net.client(p.address)
    client.send(client.hello(net), RenewLeases((A,)))
    (heard,) = net.events(p)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.close()
    p.send(heard.conn, DropLeases((A,)))

    assert [type(event) for event in net.events(p)] == [ConnectionLost]


class Broken:
    """A socket on which the system reports an error."""

    def __init__(self, sock, number, on):
        self.sock = sock
        self.number = number
        self.on = on

    def __getattr__(self, name):
        if name == self.on:
            raise_now = OSError(self.number, "the system says so")

            def fail(*args):
                raise raise_now

            return fail
        return getattr(self.sock, name)


@pytest.mark.parametrize("on", ["recv", "send"])
@pytest.mark.parametrize(
    ("number", "silent"),
    [
        (errno.ETIMEDOUT, True),
        (errno.EHOSTUNREACH, True),
        (errno.ENETUNREACH, True),
        (errno.EHOSTDOWN, True),
        (errno.ENETDOWN, True),
        (errno.ECONNRESET, True),
        (errno.ECONNABORTED, True),
        (errno.EPIPE, False),
    ],
    ids=lambda value: errno.errorcode.get(value, value),
)
def test_a_peer_that_fell_silent_may_live(net, number, silent, on):
    """Its writes may still arrive, unlike those of a peer whose process has closed the connection.

    A reset is no such end: a kernel that gave up a cut connection answers so later, and so may anything between.
    """
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    found = d._conns[conn]
    found.tls.sock = Broken(found.tls.sock, number, on)
    if on == "recv":
        d._read(found)
    else:
        d.send(conn, RenewLeases((A,)))
    (lost,) = d.poll(0)

    assert (lost.conn, lost.silent) == (conn, silent)
    assert lost.reset == (number in (errno.ECONNRESET, errno.ECONNABORTED))


def test_a_peer_that_closed_is_not_silent_but_one_that_we_gave_up_is(net):
    """It may go on."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    d.close(conn)
    assert [event.silent for event in net.events(p)] == [False]
    net.connect(d, p)
    (found,) = p._conns.values()
    found.tls.write(frame(b"nonsense"))
    found.tls.send()

    assert [event.silent for event in net.events(d)] == [True]


def test_connections_tell_when_the_other_machine_is_gone(net):
    """Without a FIN and without traffic: half-open connections would pile up for ever."""
    d = net.link()
    p = net.listener()
    conn = net.connect(d, p)
    sock = d._conns[conn].tls.sock

    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == connection.USER_TIMEOUT_MS


def test_a_port_that_is_taken_is_a_settings_error(net):
    """In one sentence that names the variables."""
    p = net.listener()
    other = net.link()

    with pytest.raises(SettingsError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        other.listen(p.address, HandshakeServer(WELCOME, in_force(b"")))


def test_a_port_beyond_the_last_is_a_settings_error(net):
    """The data-parallel rank is added to it."""
    with pytest.raises(SettingsError, match=r"127\.0\.0\.1:65536"):
        net.link().listen(Address("127.0.0.1", 65536), HandshakeServer(WELCOME, in_force(b"")))


def test_it_listens_on_ipv6(net):
    """Clusters without IPv4 exist."""
    try:
        address = net.link().listen(Address("::1", 0), HandshakeServer(WELCOME, in_force(b"")))
    except SettingsError:
        pytest.skip("this machine has no IPv6")

    assert str(address).startswith("[::1]:")


def test_stop_leaves_nothing_open(net):
    """No thread and no file, with connections, clients and a meeting under way."""
    d = net.link()
    p = net.listener()
    slow = net.listener(server=SlowServer)
    before = open_files()
    net.connect(d, p)
    net.client(p.address)
    d.connect(slow.address, P)
    net.idle(d, 0.05)
    net.closing.close()
    end = time.monotonic() + LONG
    while _handshake_threads() and time.monotonic() < end:
        time.sleep(0.01)

    assert _handshake_threads() == []
    assert open_files() < before


def test_an_attempt_that_succeeds_after_stop_is_closed(net):
    """Its thread cannot be interrupted; its connection has no owner any more."""
    d = net.link()
    p = net.listener(server=SlowServer)
    d.connect(p.address, P)
    net.idle(p, 0.02)
    net.stop(d)
    net.links.remove(d)
    events = net.idle(p, 0.6)
    end = time.monotonic() + LONG
    while not of(ConnectionLost)(events) and time.monotonic() < end:
        events += net.idle(p, 0.02)

    assert of(ConnectionLost)(events)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def _handshake_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("pdrelay-handshake")]
