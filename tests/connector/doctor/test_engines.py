"""A running engine's side channel, met by a peer that wants nothing from it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pdrelay_connector.core.ports import MessageReceived
from pdrelay_connector.doctor.engines import diagnose_engines, look_at
from pdrelay_connector.settings import Settings
from support.engines import FINGERPRINT, changed
from support.side_channel import WELCOME, Net

pytestmark = pytest.mark.edges


SECRET = b"the secret of all engines"
OURS = Settings(secrets=(SECRET,))
OTHER = Settings(secrets=(b"another secret of engines",))


@pytest.fixture
def net():
    net = Net()
    with net.closing:
        yield net


@pytest.fixture
def look(net):
    """Look at an engine while it serves."""
    seen = []

    def look(listener, engine="p0", settings=OURS):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(look_at, engine, listener.address, settings)
            while not found.done():
                seen.extend(net.idle(listener, 0.01))
        return found.result()

    yield look
    assert not [event for event in seen if isinstance(event, MessageReceived)]  # the engine was told nothing


def test_an_engine_shows_its_fingerprint_and_shape(net, look):
    """Nothing is sent after the handshake, so no lease can change."""
    facts, welcome = look(net.listener(secret=SECRET))

    assert welcome == WELCOME
    assert (facts.failure, facts.is_secret_right, facts.fingerprint) == ("", True, FINGERPRINT)
    assert (facts.ranks, facts.stages, facts.memory, facts.layers) == (1, 1, "DRAM", 1)
    assert (facts.block_size, facts.blocks) == (4, 13)
    assert diagnose_engines([(facts, welcome)]) == []


def test_without_its_id_the_secret_is_tried_all_the_same(net, look):
    """An engine refuses another name only to a peer that knows the secret."""
    facts, welcome = look(net.listener(secret=SECRET), engine="")

    assert welcome is None
    assert (facts.failure, facts.is_secret_right, facts.fingerprint) == ("", True, None)
    assert diagnose_engines([(facts, welcome)]) == []


@pytest.mark.parametrize(
    ("engine", "settings", "name"),
    [("p0", OTHER, "secret"), ("", OTHER, "secret"), ("", Settings(), "secret"), ("p1", OURS, "other-process")],
)
def test_a_refusal_is_named(net, look, engine, settings, name):
    seen = look(net.listener(secret=SECRET), engine, settings)
    (finding,) = diagnose_engines([seen])

    assert seen[0].is_secret_right is (name == "other-process")
    assert finding.name == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": changed(FINGERPRINT, attention="FLASH_ATTN")}, "its attention is 'FLASH_ATTN'"),
        (
            {"ranks": (changed(WELCOME.ranks[0], regions=(changed(WELCOME.ranks[0].regions[0], width=17),)),)},
            "of 127.0.0.1",
        ),
    ],
    ids=["fingerprint", "shape"],
)
def test_two_engines_are_compared_as_their_handshake_would(net, look, changes, words):
    one = look(net.listener(secret=SECRET))
    other = look(net.listener(secret=SECRET, welcome=changed(WELCOME, **changes)))
    (finding,) = diagnose_engines([one, other])

    assert finding.name == "fingerprint"
    assert words in finding.what
