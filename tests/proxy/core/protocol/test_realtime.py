"""What is an offer of a session, which codes go where, and what both sides are told."""

import pytest

from pdrelay_proxy.core.http.framing import read_head
from pdrelay_proxy.core.protocol.realtime import (
    SessionOutcome,
    Side,
    SocketClosed,
    ended_by,
    idle,
    model_in,
    offers_session,
    overdue,
    sendable,
    upgrade_head,
)
from pdrelay_proxy.errors import BadRequest

OFFER = b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n"


def test_an_offer_leaves_http_with_one_upgrade():
    """However many there were, and in front of no body."""
    head = read_head(OFFER.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"))

    assert offers_session(head)
    assert upgrade_head(head).count(b"pgrade:") == 1
    assert upgrade_head(head).endswith(b"\r\nupgrade: websocket\r\n\r\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GET", b"POST"),
        (b"GET", b"HEAD"),
        (b"/v1/realtime", b"/v1/realtimes"),
        (b"/v1/realtime", b"/v1//realtime"),
        (b"/v1/realtime?model=m", b"/v1/realtime;model=m"),
        (b"/v1/realtime", b"/v1/completions"),
        (b"/v1/realtime", b"http://h/v1/realtime"),
        (b"/v1/realtime", b"/v1/realtim%65"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"WebSocket", b"h2c"),
        (b"WebSocket", b"websocket, h2c"),
        (b"keep-alive, Upgrade", b"keep-alive"),
        (b"keep-alive, Upgrade", b"x-upgrade"),
        (b"Host: h", b"Host: h\r\nContent-Length: 1"),
        (b"Host: h", b"Host: h\r\nTransfer-Encoding: chunked"),
    ],
)
def test_what_is_not_quite_an_offer_stays_http(old, new):
    """Two readers of a connection must agree where HTTP ends."""
    assert not offers_session(read_head(OFFER.replace(old, new)))


@pytest.mark.parametrize(
    ("query", "model"),
    [
        (b"", None),
        (b"model=m", "m"),
        (b"a=b&model=a%2Fb+c", "a/b c"),
        (b"model=", None),
        (b"intent=transcription", None),
    ],
)
def test_the_model_is_in_the_query(query, model):
    """As OpenAI's clients write it."""
    assert model_in(query) == model


@pytest.mark.parametrize("query", [b"model=a&model=b", b"model=%ff", b"a=b&" * 17, b"model=" + b"x" * 4096])
def test_a_query_that_names_no_one_model_is_refused(query):
    """The engine could be another one than the client means."""
    with pytest.raises(BadRequest) as caught:
        model_in(query)

    assert caught.value.param == "model"


def test_no_frame_has_a_code_that_must_not_be_sent():
    """RFC 6455, 7.4: these would end the other connection with an error of ours."""
    allowed = {*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)}

    assert {code: sendable(code) for code in allowed} == {code: code for code in allowed}
    assert {sendable(code) for code in range(900, 5100) if code not in allowed} == {1000}


@pytest.mark.parametrize(
    ("side", "code", "outcome", "told"),
    [
        (Side.CLIENT, 1000, SessionOutcome.CLIENT_CLOSED, 1000),
        (Side.CLIENT, 4001, SessionOutcome.CLIENT_CLOSED, 4001),
        (Side.CLIENT, 1005, SessionOutcome.CLIENT_DISCONNECTED, 1001),
        (Side.CLIENT, 1006, SessionOutcome.CLIENT_DISCONNECTED, 1001),
        (Side.CLIENT, 1002, SessionOutcome.CLIENT_ERROR, 1001),
        (Side.CLIENT, 1007, SessionOutcome.CLIENT_ERROR, 1001),
        (Side.CLIENT, 1009, SessionOutcome.TOO_LARGE, 1001),
        (Side.CLIENT, 1012, SessionOutcome.SHUTDOWN, 1001),
        (Side.ENGINE, 1000, SessionOutcome.ENGINE_CLOSED, 1000),
        (Side.ENGINE, 1001, SessionOutcome.ENGINE_CLOSED, 1001),
        (Side.ENGINE, 4000, SessionOutcome.ENGINE_CLOSED, 4000),
        (Side.ENGINE, 1006, SessionOutcome.ENGINE_FAILED, 1011),
        (Side.ENGINE, 1009, SessionOutcome.ENGINE_FAILED, 1011),
        (Side.ENGINE, 1011, SessionOutcome.ENGINE_FAILED, 1011),
        (Side.ENGINE, 1012, SessionOutcome.ENGINE_FAILED, 1011),
    ],
)
def test_the_end_of_one_side_is_told_to_the_other(side, code, outcome, told):
    """An engine's own words pass only with a good end: others may name what is behind the router."""
    end = ended_by(SocketClosed(side, code, "10.0.0.7 said so"))

    assert (end.outcome, end.code) == (outcome, told)
    assert ("10.0.0.7" in end.reason) == (outcome in (SessionOutcome.CLIENT_CLOSED, SessionOutcome.ENGINE_CLOSED))
    assert (end.error is not None) == (outcome in (SessionOutcome.ENGINE_FAILED, SessionOutcome.SHUTDOWN))


def test_a_reason_fits_its_frame():
    """123 bytes, and no half of a character."""
    end = ended_by(SocketClosed(Side.ENGINE, 1000, "\u00e9" * 100))

    assert len(end.reason.encode()) == 122
    assert idle(60.0).reason == "no message came through for 60 s"
    assert overdue(3600.0).reason == "a session may last 3600 s"
