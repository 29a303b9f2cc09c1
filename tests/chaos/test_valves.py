"""The valves themselves, in front of a server that ends its connection behind each answer."""

import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from support.cluster import wait_until
from support.valves import Passing, open_valves

pytestmark = pytest.mark.edges


REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextmanager
def valve_of(answer):
    """Yield the valve of a server that answers each connection once, and ends it, as engines do with idle ones."""

    def serve():
        while (connection := accept()) is not None:
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

    def accept():
        try:
            return listening.accept()[0]
        except OSError:  # the test is over
            return None

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            host, port = listening.getsockname()
            with open_valves([SimpleNamespace(host=host, port=port)]) as (valve,):
                yield valve
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(20)


def read_all(client):
    return b"".join(iter(lambda: client.recv(4096), b""))


@contextmanager
def asked(valve):
    host, port = valve.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(REQUEST)
        yield client


@pytest.mark.parametrize("answer", [ANSWER, ANSWER[:-1]], ids=["whole", "cut"])
def test_an_answer_that_is_held_outlives_the_connection_to_its_engine(answer):
    """Engines end what is idle for five seconds: on a busy machine an answer is held for longer."""
    with valve_of(answer) as valve:
        valve.hold(Passing.ANSWER)
        with asked(valve) as client:
            wait_until(lambda: valve.seen[Passing.ANSWER] == 1, seconds=20, what="the answer is here")
            wait_until(lambda: not any(pipe._engine for pipe in valve._pipes), seconds=20, what="the engine has ended")
            valve.release()

            assert read_all(client) == answer


def test_another_answer_is_for_requests_that_are_here():
    """And not for those that come later over a connection that is open already."""
    with valve_of(ANSWER) as valve:
        valve.hold(Passing.ANSWER)
        host, port = valve.address.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as later, asked(valve) as client:
            wait_until(lambda: valve.seen[Passing.ANSWER] == 1, seconds=20, what="the answer is here")
            valve.answer_instead(b"another")
            valve.release()
            instead = read_all(client)
            later.sendall(REQUEST)

            assert (instead, later.recv(4096)) == (b"another", ANSWER)
