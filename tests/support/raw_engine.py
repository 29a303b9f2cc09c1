"""A server that says what a script says, byte for byte: to see what a client makes of it."""

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

_PATIENCE_S = 10.0  # for a client that should have said or closed something


class Hung(Exception):
    """The client has ended the connection."""


@dataclass(frozen=True)
class Request:
    """What a client has sent."""

    head: bytes
    body: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.head.lower().split(b"\r\n")

    def value(self, name: bytes) -> bytes | None:
        values = [line.partition(b": ")[2] for line in self.head.split(b"\r\n") if line.lower().startswith(name + b":")]
        assert len(values) < 2
        return values[0] if values else None


class Talk:
    """One connection, from the server's side."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number  # of connections before it
        self._read = bytearray()

    def request(self, *, with_body: bool = True) -> Request:
        """Read a request; raises Hung when none comes."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        end = self._read.index(b"\r\n\r\n")
        head = bytes(self._read[:end])
        del self._read[: end + 4]
        length = int(Request(head, b"").value(b"content-length") or 0) if with_body else 0
        while len(self._read) < length:
            self._more()
        body = bytes(self._read[:length])
        del self._read[:length]
        return Request(head, body)

    def send(self, data: bytes, *, piece: int = 0) -> None:
        """Send it, at once or in pieces of so many bytes, each a packet of its own."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            for at in range(0, len(data), piece or len(data) or 1):
                self.sock.sendall(data[at : at + (piece or len(data))])

    def reset(self) -> None:
        """End the connection with an RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def hung_up(self) -> bool:
        """Wait for the client to end the connection."""
        try:
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _more(self) -> None:
        try:
            data = self.sock.recv(65536)
        except OSError as exc:
            raise Hung from exc
        if not data:
            raise Hung
        self._read += data


@dataclass
class RawEngine:
    """What has happened so far; ``at`` is where it listens, as host:port."""

    at: str
    port: int
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    hung: list[bool] = field(default_factory=list)  # whether clients ended the connection when that was looked for
    faults: list[BaseException] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)


Script = Callable[[RawEngine, Talk], None]


def replying(*answers: bytes, piece: int = 0) -> Script:
    """Answer the requests of a connection one by one, and then wait for its end."""

    def script(engine: RawEngine, talk: Talk) -> None:
        for answer in answers:
            engine.requests.append(talk.request())
            talk.send(answer, piece=piece)
        talk.request()

    return script


def closing(answer: bytes, *, reset: bool = False) -> Script:
    """Answer one request, and end the connection at once."""

    def script(engine: RawEngine, talk: Talk) -> None:
        engine.requests.append(talk.request())
        talk.send(answer)
        if reset:
            talk.reset()

    return script


def endless(beginning: bytes, piece: bytes, *, pause_s: float = 0.0) -> Script:
    """Read a request and send pieces until the client hangs up; with a pause, each is in time for one read."""

    def script(engine: RawEngine, talk: Talk) -> None:
        engine.requests.append(talk.request())
        pour(talk, beginning, piece, pause_s=pause_s)

    return script


def pour(talk: Talk, beginning: bytes, piece: bytes, *, pause_s: float = 0.0) -> None:
    """Do so for a request that was read."""
    talk.sock.sendall(beginning)
    while True:
        talk.sock.sendall(piece)
        time.sleep(pause_s)


@contextmanager
def raw_engine(script: Script, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Generator[RawEngine]:
    """Run the script for every connection, each in a thread; what goes wrong in it is raised at the end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)  # what is not read is soon held up
        port = listener.getsockname()[1]
        engine = RawEngine(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", port)
        threads: list[threading.Thread] = []

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                sock.settimeout(_PATIENCE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=_serve, args=(engine, script, sock, tls, engine.connections))
                engine.connections += 1
                threads.append(thread)
                thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield engine
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(_PATIENCE_S)
            for sock in engine.sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(_PATIENCE_S)
    if engine.faults:
        raise engine.faults[0]


@contextmanager
def listening_in_vain() -> Generator[str]:
    """Yield host:port of a socket that takes no connection: its queue is full, and Linux drops what else comes."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def _serve(engine: RawEngine, script: Script, sock: socket.socket, tls: ssl.SSLContext | None, number: int) -> None:
    try:
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True)
        engine.sockets.append(sock)
        with sock:
            script(engine, Talk(sock, number))
    except (Hung, OSError):
        pass
    except BaseException as exc:
        engine.faults.append(exc)
