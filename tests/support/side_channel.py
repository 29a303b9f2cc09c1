"""Links on real loopback sockets, and raw TLS clients that send them arbitrary messages."""

import contextlib
import functools
import os
import socket
import ssl
import time

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.messages import PROTOCOL, ServerProof, Welcome, decode, encode
from pdrelay_connector.core.ports import PeerConnected
from pdrelay_connector.core.session.handshake import NONCE_BYTES, ClientConnection, HandshakeClient, HandshakeServer
from pdrelay_connector.io.framing import Deframer, frame
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.tls import Tls, digest_of
from pdrelay_connector.settings import Settings
from support.engines import FINGERPRINT, rank_info

WELCOME = Welcome(PROTOCOL, EngineId("p0"), FINGERPRINT, (rank_info("p0"),))
A = RequestId("a")
P = EngineId("p0")
NO_NONCE = b"\0" * NONCE_BYTES
LONG = 30.0  # s: more than anything here takes, however busy the machine is


TLS = Settings()


def in_force(secret):
    """Secrets that never change: one, several or none."""
    secrets = secret if isinstance(secret, tuple) else (secret,) if secret else ()
    return lambda: secrets


class SlowServer(HandshakeServer):
    """Answers a Hello after 0.3 s."""

    def answer(self, message, arrival):
        time.sleep(0.3)
        return super().answer(message, arrival)


class Net:
    """The links and raw clients of one test, closed at its end."""

    def __init__(self):
        self.closing = contextlib.ExitStack()
        self.links, self.running = [], []

    def link(self, *, secret=b"s", timeout=LONG, threads=8, engine="d0", settings=TLS, local_only=False, **who):
        client = HandshakeClient(EngineId(engine), in_force(secret), **who)
        counters = Counters()
        link = SocketLink(client, Tls(settings), counters, timeout=timeout, threads=threads, local_only=local_only)
        link.counters = counters
        self.closing.callback(self.stop, link)
        self.links.append(link)
        self.running.append(link)
        return link

    def stop(self, link):
        if link in self.running:
            self.running.remove(link)
            link.stop()

    def listener(self, *, welcome=WELCOME, secret=b"s", server=HandshakeServer, **options):
        link = self.link(secret=secret, **options)
        link.address = link.listen(Address("127.0.0.1", 0), server(welcome, in_force(secret), "127.0.0.1"))
        return link

    def client(self, address, *, source=None, keylog=None):
        sock = socket.create_connection(address, LONG, source_address=source and (source, 0))
        return RawClient(self, address, self.closing.enter_context(sock), keylog)

    def events(self, link, until=lambda events: events, seconds=LONG):
        """Poll all links in turn until ``until`` accepts the events of ``link``."""
        events = []
        end = time.monotonic() + seconds
        while not until(events) and time.monotonic() < end:
            for other in self.links:
                if other is not link:
                    list(other.poll(0))
            events += link.poll(0.005)
        assert until(events), events
        return events

    def idle(self, link, seconds=0.1):
        """Poll all links for a while, and some times at least; return the events of ``link``."""
        events = []
        end = time.monotonic() + seconds
        least = 5
        while time.monotonic() < end or least > 0:
            least -= 1
            for other in self.links:
                seen = list(other.poll(0.002))
                events += seen if other is link else []
        return events

    def connect(self, link, listener):
        conn = link.connect(listener.address, P)
        (met,) = self.events(link)
        assert met == PeerConnected(conn, WELCOME)
        return conn


class RawClient:
    """A TLS connection to a listener that sends arbitrary messages."""

    def __init__(self, net, address, sock, keylog=None):
        self.net, self.address, self.raw, self.keylog, self.deframer = net, address, sock, keylog, Deframer(1 << 26)

    @functools.cached_property
    def sock(self):
        """The connection, encrypted; the listener must be polled meanwhile."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.keylog_filename = self.keylog
        sock = context.wrap_socket(self.raw, do_handshake_on_connect=False)
        self.net.closing.enter_context(sock)
        sock.settimeout(0.01)
        for _ in range(500):
            with contextlib.suppress(TimeoutError):
                sock.do_handshake()
                sock.settimeout(LONG)
                return sock
            self.net.idle(None, 0.005)
        raise AssertionError("no TLS")

    def send(self, *messages):
        self.sock.sendall(b"".join(frame(encode(message)) for message in messages))

    def receive(self, net):
        try:
            self.sock.settimeout(0.01)
        except OSError:  # of TLS: it was closed before
            return None
        for _ in range(500):
            net.idle(None, 0.005)
            for message in self.deframer.feed(b""):
                return decode(message)
            with contextlib.suppress(TimeoutError):
                if not (data := self.read()):
                    return None
                for message in self.deframer.feed(data):
                    return decode(message)
        raise AssertionError("no message arrived")

    def read(self):
        try:
            return self.sock.recv(1 << 20)
        except ConnectionError:
            return b""

    def hello(self, net, secret=b"s", *, engine="x", challenge=None, **call):
        """Return a valid Hello, except for the given fields."""
        challenge = challenge or self.receive(net)
        certificate = digest_of(self.sock.getpeercert(binary_form=True))
        who = {key: call.pop(key) for key in ("role", "badge", "workers") if key in call}
        given = ClientConnection(P, self.address, "127.0.0.1", certificate, os.urandom(NONCE_BYTES))._replace(**call)
        return HandshakeClient(EngineId(engine), in_force(secret), **who).hello(challenge, given)

    def authenticate(self, net, secret=b"s", **options):
        """Complete the handshake."""
        self.send(self.hello(net, secret, **options))
        assert isinstance(self.receive(net), ServerProof)
        assert self.receive(net) == WELCOME


@contextlib.contextmanager
def dialled(net, **options):
    """A server that is not an engine's, and a link that has begun to connect to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        d = net.link(**options)
        d.connect(Address(*server.getsockname()), P)
        yield server, d


def serve_tls(server, tls=None, keylog=None):
    """Accept one connection, and complete TLS on it; return the socket."""
    sock, _ = server.accept()
    sock.settimeout(LONG)
    context = (tls or Tls(TLS)).contexts().server
    context.keylog_filename = keylog
    return context.wrap_socket(sock, server_side=True)
