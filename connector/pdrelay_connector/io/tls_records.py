"""TLS over a socket, one record at a time.

:class:`ssl.SSLSocket` reads from the socket until it has something to return. Records of key
updates (RFC 8446, 4.6.3) never have: a peer that sends nothing else keeps such a call busy for
ever. Here every call ends after one record.
"""

import contextlib
import socket
import ssl
import struct

# TLS records before the proof. A handshake takes 14 with the 100 KiB of certificates that OpenSSL
# allows, a message of MAX_UNAUTHENTICATED_FRAME bytes 3. A key update is one, of 27 bytes and 25 to
# 50 us.
MAX_UNAUTHENTICATED_RECORDS = 32
MAX_RECORD = 1 << 14  # bytes that one holds (RFC 8446, 5.1)
PIECE = 1 << 16  # bytes taken from the socket, or encrypted for it, at a time
_HEAD = struct.Struct(">BHH")  # type, version and length of a record
_CLOSED = "it closed the connection"


class TlsRecords:
    """One side of a TLS connection.

    The socket may block, with a timeout, or not: its errors are passed on.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        """Raises ``ValueError`` if the name cannot be a host's, or ``OSError``."""
        self.sock = sock
        self.records = 0  # that the peer has begun to send
        self.is_shaking = True  # the handshake is not complete
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._received = bytearray()  # from the socket, and not yet given to TLS
        self._rest = 0  # bytes of the record that TLS has got the beginning of
        self._plain = bytearray()  # to be encrypted
        self._sealed = bytearray()  # to be sent
        # TLS encrypts nothing before it has read more: it has got half a key update
        self._is_stalled = False
        if not server_side:
            self._step()  # says hello

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent; few of them are encrypted already."""
        return len(self._plain) + len(self._sealed)

    @property
    def unsent_sealed(self) -> int:
        """Those of them that are: no more than a piece, and what TLS itself has to say."""
        return len(self._sealed)

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`send` has something to do."""
        return bool(self._sealed) or (
            bool(self._plain) and not self.is_shaking and not self._is_stalled
        )

    def peer_certificate(self) -> bytes | None:
        """Return what the peer has shown (DER)."""
        return self._tls.getpeercert(binary_form=True)

    def recv(self) -> bytes:
        """Read at most one record; return its data, or nothing if it belongs to the handshake.

        Raises ``ConnectionResetError`` if the peer has closed the connection, and what the socket
        raises if it has nothing: ``BlockingIOError`` or ``TimeoutError``.
        """
        if len(self._received) < (1 if self._rest else _HEAD.size):
            received = self.sock.recv(PIECE)
            if not received:
                raise ConnectionResetError(_CLOSED)
            self._received += received
        self._feed()
        return self._step()

    def write(self, data: bytes) -> None:
        """Queue something for :meth:`send`."""
        self._plain += data

    def send(self) -> None:
        """Encrypt a piece if none is left, and send what the socket takes at once."""
        if self._plain and not self._sealed and not self.is_shaking:
            self._seal()
        if self._sealed:
            del self._sealed[: self.sock.send(self._sealed)]

    def close(self) -> None:
        """Close the socket, whatever is unsent."""
        self.sock.close()

    def _feed(self) -> None:
        """Give TLS what there is of one record."""
        if not self._rest:
            if len(self._received) < _HEAD.size:
                return
            # if it is none, TLS says so
            self._rest = _HEAD.size + int(_HEAD.unpack_from(self._received)[2])
            self.records += 1
        fed = self._received[: self._rest]
        del self._received[: len(fed)]
        self._rest -= len(fed)
        self._incoming.write(fed)

    def _step(self) -> bytes:
        try:
            if self.is_shaking:
                self._tls.do_handshake()
                self.is_shaking = False
                return b""
            self._is_stalled = False
            if not (data := self._tls.read(MAX_RECORD)):
                raise ConnectionResetError(_CLOSED)
            return data
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError:
            self._sealed += self._outgoing.read()
            # the alert that tells the peer why; the connection ends anyway
            with contextlib.suppress(OSError):
                self.sock.send(self._sealed)
            raise
        finally:
            self._sealed += self._outgoing.read()

    def _seal(self) -> None:
        try:
            del self._plain[: self._tls.write(self._plain[:PIECE])]
        except ssl.SSLWantReadError:
            self._is_stalled = True
        self._sealed += self._outgoing.read()
