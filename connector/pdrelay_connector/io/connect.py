"""Opens an authenticated connection to another engine. It blocks, so it runs on a pool thread.

Name resolution, the TCP connection, TLS and the peer's answers may each take seconds.
"""

import contextlib
import os
import socket
import ssl
import time

from pdrelay_connector.core.addresses import is_elsewhere
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.messages import (
    MAX_GREETING,
    MAX_UNAUTHENTICATED_FRAME,
    Challenge,
    Message,
    Refusal,
    ServerProof,
    Welcome,
    decode,
    encode,
    printable,
)
from pdrelay_connector.core.session.handshake import NONCE_BYTES, ClientConnection, HandshakeClient
from pdrelay_connector.errors import (
    AnotherEngine,
    IncompatiblePeer,
    PortClosed,
    ProtocolViolation,
    Unreachable,
)
from pdrelay_connector.io.framing import Deframer, frame
from pdrelay_connector.io.tls import Tls, digest_of
from pdrelay_connector.io.tls_records import MAX_UNAUTHENTICATED_RECORDS, TlsRecords


def open_connection(
    peer: Address,
    engine: EngineId,
    client: HandshakeClient,
    tls: Tls,
    *,
    timeout: float,
    local_only: bool = False,
) -> tuple[TlsRecords, Welcome]:
    """Return an encrypted and authenticated connection to ``engine``, and its Welcome.

    ``timeout`` (s) bounds the TCP connection, and again TLS with the handshake. ``local_only``:
    NIXL here uses loopback only, so it cannot reach another machine. Raises
    :exc:`~pdrelay_connector.errors.PeerError` with the peer in its text.
    """
    try:
        sock = _connect(peer, timeout)
    except ExceptionGroup as group:  # of each address that the name leads to
        is_closed = all(isinstance(exc, ConnectionRefusedError) for exc in group.exceptions)
        failure = PortClosed if is_closed else Unreachable
        raise failure(f"cannot connect to {peer}: {group.exceptions[-1]}") from group
    except (OSError, ValueError) as exc:  # ValueError: no valid host name
        raise Unreachable(f"cannot connect to {peer}: {exc}") from exc
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        reached, own = _ends(sock, peer)
        if local_only and is_elsewhere(reached, own):
            raise IncompatiblePeer(
                f"{peer} is on another machine, and this engine's NIXL listens on loopback only; "
                "set VLLM_NIXL_SIDE_CHANNEL_HOST to the address that other engines reach this "
                "machine at"
            )
        encrypted = _encrypt(sock, peer, tls, deadline)
        certificate = digest_of(encrypted.peer_certificate())
        client_connection = ClientConnection(
            engine, peer, reached, certificate, os.urandom(NONCE_BYTES)
        )
        welcome = _authenticate(encrypted, peer, client, client_connection, deadline)
        on_failure.pop_all()
    return encrypted, welcome


def _connect(peer: Address, timeout: float) -> socket.socket:
    """Connect to the first address of a name that answers.

    They share the time: a silent one leaves some to the next, and many take no more than one does.
    """
    addresses = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout
    failures: list[OSError] = []
    for left, (family, kind, protocol, _, address) in zip(
        range(len(addresses), 0, -1), addresses, strict=True
    ):
        try:
            with contextlib.ExitStack() as on_failure:
                sock = on_failure.enter_context(socket.socket(family, kind, protocol))
                sock.settimeout(_remaining_s(deadline) / left)
                sock.connect(address)
                on_failure.pop_all()
        except OSError as exc:
            failures.append(exc)
        else:
            return sock
    raise ExceptionGroup(f"no address of {peer} answers", failures)


def _ends(sock: socket.socket, peer: Address) -> tuple[str, str]:
    """Return the IP addresses of a connection: the peer's, and ours."""
    try:
        return str(sock.getpeername()[0]), str(sock.getsockname()[0])
    except OSError as exc:  # the peer has reset it already
        raise Unreachable(f"no handshake with {peer}: it closed the connection") from exc


def _encrypt(sock: socket.socket, peer: Address, tls: Tls, deadline: float) -> TlsRecords:
    try:
        encrypted = TlsRecords(
            sock, tls.contexts().client, server_hostname=tls.server_name or peer.host or "localhost"
        )
    except (OSError, ValueError) as exc:
        raise Unreachable(f"cannot connect to {peer}: {exc}") from exc
    try:
        while encrypted.is_shaking:
            _send(encrypted, b"", deadline)
            _receive_record(encrypted, peer, deadline)
        _send(encrypted, b"", deadline)
    except OSError as exc:  # SSLError is an OSError
        if isinstance(exc, ssl.SSLCertVerificationError):
            raise IncompatiblePeer(
                f"the certificate of {peer} is not accepted: {exc.verify_message}", "certificate"
            ) from exc
        if isinstance(exc, ssl.SSLError):
            raise IncompatiblePeer(
                f"{peer} does not accept our TLS 1.3 ({exc.reason}): an older engine, another "
                "service, or one that requires a client certificate (tls_cert)",
                "certificate",
            ) from exc
        raise Unreachable(f"no handshake with {peer}: {_reason_of(exc)}") from exc
    return encrypted


def _authenticate(
    encrypted: TlsRecords,
    peer: Address,
    client: HandshakeClient,
    client_connection: ClientConnection,
    deadline: float,
) -> Welcome:
    deframer = Deframer(MAX_UNAUTHENTICATED_FRAME)

    def receive(*, is_proven: bool) -> Message:
        for message in deframer.feed(b""):  # received together with the message before
            return decode(message)
        while True:
            for message in deframer.feed(
                _receive_record(encrypted, peer, deadline, is_proven=is_proven)
            ):
                return decode(message)

    try:
        challenge = receive(is_proven=False)
        if not isinstance(challenge, Challenge):
            raise _unexpected(peer, challenge)
        hello = client.hello(challenge, client_connection)
        _send(encrypted, frame(encode(hello)), deadline)
        proof = receive(is_proven=False)
        if not isinstance(proof, ServerProof):
            raise _unexpected(peer, proof)
        client.check(proof, challenge, hello, client_connection.certificate)
        deframer.limit = MAX_GREETING  # the server has proven itself
        answer = receive(is_proven=True)
    except OSError as exc:
        raise Unreachable(f"no handshake with {peer}: {_reason_of(exc)}") from exc
    except IncompatiblePeer as exc:
        raise type(exc)(f"{peer} is refused: {exc}", exc.cause) from exc
    if isinstance(answer, Welcome):
        return answer
    raise _unexpected(peer, answer)


def _unexpected(peer: Address, answer: Message) -> IncompatiblePeer | ProtocolViolation:
    if isinstance(answer, Refusal):
        refusal = f"{peer} refused: {printable(answer.reason)}"
        return (AnotherEngine if answer.is_another else IncompatiblePeer)(refusal, answer.cause)
    return ProtocolViolation(f"{peer} answered the handshake with {type(answer).__name__}")


def _reason_of(exc: OSError) -> str:
    """Return the reason for the log."""
    if isinstance(exc, TimeoutError):
        return "timed out"
    is_closed = isinstance(exc, (ConnectionResetError, BrokenPipeError))
    return "it closed the connection" if is_closed else str(exc)


def _remaining_s(deadline: float) -> float:
    if (remaining := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return remaining


def _receive_record(
    encrypted: TlsRecords, peer: Address, deadline: float, *, is_proven: bool = False
) -> bytes:
    """Return the content of the next TLS record; empty for TLS's own records."""
    # Before every record: a peer that sends a byte or a key update now and then must not occupy the
    # thread for ever.
    encrypted.sock.settimeout(_remaining_s(deadline))
    data = encrypted.recv()
    if encrypted.records > MAX_UNAUTHENTICATED_RECORDS and not is_proven:
        raise ProtocolViolation(
            f"{peer} has sent more than {MAX_UNAUTHENTICATED_RECORDS} TLS records and no proof"
        )
    return data


def _send(encrypted: TlsRecords, data: bytes, deadline: float) -> None:
    encrypted.write(data)
    while encrypted.wants_write:
        encrypted.sock.settimeout(_remaining_s(deadline))
        encrypted.send()
