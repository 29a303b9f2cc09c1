"""Open a connection to a prefill engine and get its Welcome: blocking, on a pool thread.

Name resolution, connecting and the peer's answer may each take seconds; nobody else waits.
"""

import contextlib
import socket
import time

from xpyd_connector.core.greeting import Guest
from xpyd_connector.core.ids import Address
from xpyd_connector.core.messages import MAX_GREETING, Challenge, Message, Refusal, Welcome, decode, encode
from xpyd_connector.errors import IncompatiblePeer, ProtocolViolation, Unreachable
from xpyd_connector.io.framing import Deframer, frame


def meet(peer: Address, guest: Guest, *, timeout: float) -> tuple[socket.socket, Welcome]:
    """Return an open, greeted connection.

    ``timeout`` (s) bounds connecting, and again the greeting. Raises
    :exc:`~xpyd_connector.errors.PeerError` in one sentence naming the peer.
    """
    try:
        sock = socket.create_connection(peer, timeout)
    except (OSError, ValueError) as exc:  # ValueError: a name that cannot be a host's
        raise Unreachable(f"cannot connect to {peer}: {exc}") from exc
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        welcome = _greet(sock, peer, guest, time.monotonic() + timeout)
        on_failure.pop_all()
    return sock, welcome


def _greet(sock: socket.socket, peer: Address, guest: Guest, deadline: float) -> Welcome:
    deframer = Deframer(MAX_GREETING)
    try:
        challenge = _receive(sock, deframer, deadline)
        if isinstance(challenge, Challenge):
            sock.sendall(frame(encode(guest.hello(challenge))))
        answer = _receive(sock, deframer, deadline) if isinstance(challenge, Challenge) else challenge
    except OSError as exc:
        raise Unreachable(f"{peer} did not say hello: {exc}") from exc
    match answer:
        case Welcome():
            return answer
        case Refusal(reason):
            raise IncompatiblePeer(f"{peer} refused: {reason}")
        case _:
            raise ProtocolViolation(f"{peer} answered hello with {type(answer).__name__}")


def _receive(sock: socket.socket, deframer: Deframer, deadline: float) -> Message:
    while True:
        # Before every recv: a peer that sends a byte now and then must not occupy this thread for ever.
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        data = sock.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the connection")
        for message in deframer.feed(data):
            return decode(message)
