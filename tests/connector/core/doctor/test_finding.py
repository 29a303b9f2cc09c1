"""Why two processes have not met: recognised by what our own handshake says, so the two must not drift apart."""

from types import SimpleNamespace

import msgspec
import pytest

from pdrelay_connector.core.doctor.finding import refusal
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.messages import PROTOCOL
from pdrelay_connector.core.session.handshake import HandshakeServer
from support.cluster import free_ports
from support.side_channel import WELCOME, Net, P, in_force

pytestmark = pytest.mark.edges


@pytest.fixture
def net():
    net = Net()
    with net.closing:
        yield net


class OlderServer(HandshakeServer):
    """An engine of another protocol."""

    def answer(self, message, arrival):
        return super().answer(msgspec.structs.replace(message, protocol=PROTOCOL - 1), arrival)


class FarServer(HandshakeServer):
    """An engine behind a relay: it does not listen where it was dialled."""

    def answer(self, message, arrival):
        return super().answer(message, arrival._replace(reached=Address("10.9.9.9", 1)))


def failure(net, listener, expects=P, **options):
    """Connect, and return what the link says."""
    link = net.link(**options)
    link.connect(listener.address, expects)
    (event,) = net.events(link)
    return event.reason


CASES = {
    "another secret": ({}, {"secret": b"t"}, "secret"),
    "no secret here": ({}, {"secret": b""}, "secret"),
    "no secret there": ({"secret": b""}, {}, "secret"),
    "another engine": ({}, {"expects": EngineId("p1")}, "other-process"),
    "another protocol": ({"server": OlderServer}, {}, "protocol"),
    "another address": ({"server": FarServer}, {}, "address"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_recognised(net, case):
    """And its mend is not that of another one."""
    listens, dials, name = CASES[case]
    reason = failure(net, net.listener(**listens), **dials)

    assert refusal(reason).name == name
    assert refusal(reason).what == reason


def test_a_port_without_a_listener_and_one_that_is_no_side_channel(net):
    nobody = SimpleNamespace(address=Address("127.0.0.1", free_ports(1)[0]))

    assert refusal(failure(net, nobody)).name == "not-listening"
    assert refusal(f"{nobody.address} does not accept our TLS 1.3 (WRONG_VERSION_NUMBER): ...").name == "tls"
    assert refusal("something new").name == "refused"


def test_a_server_that_does_not_know_the_secret_is_named(net):
    """It accepts anybody, as a stranger's would."""

    class Stranger(HandshakeServer):
        def answer(self, message, arrival):
            return super().answer(msgspec.structs.replace(message, proofs=()), arrival)

    stranger = net.link(secret=b"")
    stranger.address = stranger.listen(Address("127.0.0.1", 0), Stranger(WELCOME, in_force(b""), "127.0.0.1"))

    assert refusal(failure(net, stranger)).name == "secret"
