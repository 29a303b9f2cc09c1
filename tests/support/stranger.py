"""A process that does not know the secret, and tries to get something out of an engine's side channel.

``python -m support.stranger`` says "ready", reads one line with HOST PORT ENGINE REQUEST, and prints what it got, as
one JSON object: attempt -> answer.
"""

import contextlib
import json
import socket
import ssl
import sys

from pdrelay_connector.core.ids import Address, BlockId, EngineId, RequestId
from pdrelay_connector.core.messages import (
    CancelPushes,
    DropLeases,
    LentBlocks,
    ReadDone,
    RegisterPush,
    RenewLeases,
    WorkerHello,
    decode,
    encode,
)
from pdrelay_connector.core.session.handshake import HandshakeClient
from pdrelay_connector.errors import PeerError
from pdrelay_connector.io.connect import open_connection
from pdrelay_connector.io.framing import Deframer, frame
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.settings import Settings

TIMEOUT = 5.0  # s


def main(host, port, engine, request):
    address = Address(host, int(port))
    name = RequestId(request)
    blunt = {
        "renew": RenewLeases((name,)),
        "drop": DropLeases((name,)),
        "done": ReadDone(name, RequestId("mine"), 0, 1),
        "register": RegisterPush(RequestId("mine"), name, "digest", (LentBlocks(0, 32, (BlockId(1),)),)),
        "stop": CancelPushes((name,)),
        "attend": WorkerHello(0, b"a guess"),
    }
    got = {
        "no secret": greeting(address, engine, ()),
        "a guess": greeting(address, engine, (b"a guess at the secret",)),
        "in the clear": in_the_clear(address),
        **{label: without_hello(address, message) for label, message in blunt.items()},
    }
    print(json.dumps(got))


def greeting(address, engine, secrets):
    """Greet as an engine does; the answer, or the word "welcome"."""
    try:
        sock, welcome = open_connection(
            address, EngineId(engine), HandshakeClient(EngineId("x"), lambda: secrets), Tls(Settings()), timeout=TIMEOUT
        )
    except PeerError as exc:
        return str(exc)
    sock.close()
    return f"welcome: {len(encode(welcome))} bytes"


def in_the_clear(address):
    """Say something without TLS, as engines of protocol 3 did."""
    with socket.create_connection(address, TIMEOUT) as sock, contextlib.suppress(OSError):
        sock.sendall(frame(b"\x82\xa4type\xa5hello\xa8protocol\x03"))
        return sock.recv(1 << 16).hex()
    return ""


def without_hello(address, message):
    """Say what only an engine may say; the names of the messages that come back."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    deframer = Deframer(1 << 20)
    heard = []
    with context.wrap_socket(socket.create_connection(address, TIMEOUT)) as sock, contextlib.suppress(OSError):
        sock.sendall(frame(encode(message)))
        while data := sock.recv(1 << 16):
            heard += [type(decode(each)).__name__ for each in deframer.feed(data)]
    return ", ".join(heard)


if __name__ == "__main__":
    print("ready", flush=True)
    main(*sys.stdin.readline().split())
