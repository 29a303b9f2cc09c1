"""A client that sends bytes, good or bad, and reads what comes back; it knows nothing of the router but its port."""

import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One answer; the names of the headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Over(Exception):
    """The connection ended before the answer did."""


class Incoming:
    """What comes over a connection, taken in parts."""

    def __init__(self, sock):
        self.sock = sock
        self.left = b""

    def until(self, mark):
        """Return what is before a mark; raises Over."""
        while mark not in self.left:
            self._more()
        found, _, self.left = self.left.partition(mark)
        return found

    def wait_for(self, mark):
        """Wait until a mark is here, and leave all in its place; raises Over."""
        while mark not in self.left:
            self._more()

    def exactly(self, size):
        """Return so many bytes; raises Over."""
        while len(self.left) < size:
            self._more()
        found, self.left = self.left[:size], self.left[size:]
        return found

    def _more(self):
        more = b""
        with suppress(ConnectionError, ssl.SSLError):
            more = self.sock.recv(65536)
        if not more:
            raise Over(f"the connection ended after {self.left!r}")
        self.left += more


class RawClient:
    """One connection; raises Over if it ends within its TLS handshake."""

    def __init__(self, port, *, tls=None, timeout=20, address="127.0.0.1"):
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=timeout, source_address=(address, 0))
        if tls is not None:
            try:
                self.sock = tls.wrap_socket(self.sock, server_hostname="127.0.0.1")
            except (ConnectionError, ssl.SSLEOFError) as exc:
                self.sock.close()
                raise Over("the connection ended within its TLS handshake") from exc
        self.incoming = Incoming(self.sock)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, *pieces):
        """Send pieces, each in a packet of its own; a router that has hung up is no error."""
        with suppress(ConnectionError, ssl.SSLError):
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(0.002)
                self.sock.sendall(piece)
        return self

    def flood(self, piece, size):
        """Send one piece again and again, so many bytes or until the router hangs up."""
        with suppress(ConnectionError, ssl.SSLError):
            for _ in range(size // len(piece)):
                self.sock.sendall(piece)
        return self

    def answer(self, *, to_head=False):
        """Read one answer; raises Over."""
        while True:
            head = self.incoming.until(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 100"):
                break
        first, *lines = head.decode("latin-1").split("\r\n")
        assert re.fullmatch(r"HTTP/1\.1 [1-5][0-9][0-9] .*", first), first
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), f"a header stands there twice: {head!r}"
        body = b""
        if to_head:
            pass
        elif "content-length" in headers:
            body = self.incoming.exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(self.incoming.until(b"\r\n"), 16):
                body += self.incoming.exactly(size)
                self.incoming.exactly(2)
            self.incoming.exactly(2)
        else:
            body = self.rest()
        return Answer(int(first.split()[1]), headers, body)

    def answers(self):
        """Read all answers to the end of the connection."""
        found = []
        while True:
            try:
                found.append(self.answer())
            except Over:
                assert not self.incoming.left, f"half an answer: {self.incoming.left!r}"
                return found

    def rest(self):
        """Read to the end of the connection."""
        read = self.incoming.left
        self.incoming.left = b""
        with suppress(ConnectionError, ssl.SSLError):
            while more := self.sock.recv(65536):
                read += more
        return read
