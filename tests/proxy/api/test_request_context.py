"""What a /v1 request gets that is not for an endpoint, whatever becomes of it."""

import logging
from contextlib import suppress
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from pdrelay_proxy.api.request_context import RequestContextMiddleware, id_headers, note_fault, record_of
from pdrelay_proxy.core.model import InstanceId, LegOrder, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import LegRecord
from pdrelay_proxy.io.request_path.access_log import log_requests


class Client:
    """Collects what is sent to it."""

    def __init__(self):
        self.messages = []

    async def send(self, message):
        self.messages.append(message)


def tracking(app):
    times = iter([1.0, 1.5])
    return RequestContextMiddleware(
        app,
        new_id=lambda: RequestId("pdrelay-1"),
        clock=lambda: next(times),
        request_over=lambda record: log_requests([record]),
    )


def scope(path="/v1/models", kind="http", method="GET"):
    return {"type": kind, "path": path, "method": method}


async def answer(scope, receive, send):
    record_of(scope).decode = LegRecord(InstanceId("decode-0"), 2.0)
    await send({"type": "http.response.start", "status": 204, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body"})


async def test_the_id_is_added_to_the_answer():
    """Beside the headers it has already."""
    client = Client()
    await tracking(answer)(scope(), None, client.send)

    assert client.messages[0]["headers"] == [
        (b"a", b"b"),
        (b"x-request-id", b"pdrelay-1"),
        (b"x-content-type-options", b"nosniff"),
    ]


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


async def test_a_request_leaves_one_line(caplog):
    """With the time it took, in milliseconds."""
    caplog.set_level(logging.INFO)
    await tracking(answer)(scope(), None, Client().send)

    assert lines(caplog) == [
        "request_id=pdrelay-1 path=/v1/models prefill=- decode=decode-0 status=204 duration_ms=500.0 ttft_ms=- "
        "prefill_ms=- queue_ms=-"
    ]


async def test_a_client_that_hung_up_is_not_an_error(caplog):
    """It is logged with the status that says so, and nobody is answered."""
    caplog.set_level(logging.INFO)

    async def app(scope, receive, send):
        note_fault(scope, ValueError("why"))
        raise ClientDisconnect

    client = Client()
    await tracking(app)(scope(), None, client.send)

    assert not client.messages
    assert lines(caplog) == [
        "request_id=pdrelay-1 path=/v1/models prefill=- decode=- status=499 duration_ms=500.0 ttft_ms=- "
        "prefill_ms=- queue_ms=- error='why'"
    ]


async def test_a_bug_is_logged_as_what_the_client_gets(caplog):
    """And goes on to the place where bugs are answered."""
    caplog.set_level(logging.INFO)

    async def app(scope, receive, send):
        raise KeyError

    with pytest.raises(KeyError):
        await tracking(app)(scope(), None, Client().send)

    assert lines(caplog)[0].endswith("status=500 duration_ms=500.0 ttft_ms=- prefill_ms=- queue_ms=-")


async def test_a_path_cannot_forge_lines(caplog):
    """A line break in a path stays on its line."""
    caplog.set_level(logging.INFO)
    await tracking(answer)(scope("/v1/a\nrequest_id=forged"), None, Client().send)

    assert r"path=/v1/a\nrequest_id=forged " in lines(caplog)[0]


OTHERS = [scope("/health"), scope("/v1/x", kind="lifespan"), scope("/v1/completions", method="POST")]


@pytest.mark.parametrize("untracked", OTHERS)
async def test_other_requests_pass_untouched(untracked, caplog):
    """Probes would fill the log, and a request for an endpoint is followed elsewhere."""
    caplog.set_level(logging.INFO)
    seen = []

    async def app(scope, receive, send):
        seen.append(send)
        note_fault(scope, ValueError())
        assert id_headers(scope) == {}

    client = Client()
    await tracking(app)(untracked, None, client.send)

    assert seen == [client.send]
    assert not caplog.records


async def test_the_line_tells_what_was_unusual(caplog):
    """Other tries, the order of the legs, and what happened behind the client's back."""

    async def app(scope, receive, send):
        record = record_of(scope)
        record.prefill = LegRecord(InstanceId("prefill-0"))
        record.push = LegOrder.CONCURRENT
        record.prefill_error = "broke off"
        record.set_aside(Role.PREFILL, Failure.BAD_RESPONSE)
        await answer(scope, receive, send)

    caplog.set_level(logging.INFO)
    await tracking(app)(scope(), None, Client().send)

    assert lines(caplog)[0].endswith(
        " queue_ms=- mode='push' retries='prefill-0 bad_response' prefill_error='broke off'"
    )


@pytest.mark.parametrize(("raises", "status"), [(None, 204), (ClientDisconnect, 499), (KeyError, 500)])
async def test_who_follows_a_request_learns_how_it_ended(raises, status):
    """Whatever becomes of it, once, and with the headers it came with."""
    seen = []

    class Spans:
        def request(self, record, headers):
            return SimpleNamespace(end=lambda: seen.append((record.path, headers, record.status)))

    async def app(scope, receive, send):
        if raises is not None:
            raise raises
        await answer(scope, receive, send)

    follow = RequestContextMiddleware(
        app,
        new_id=lambda: RequestId("r"),
        clock=lambda: 1.0,
        spans=Spans(),
        request_over=lambda record: log_requests([record]),
    )
    with suppress(KeyError):
        await follow(scope() | {"headers": [(b"a", b"b")]}, None, Client().send)

    assert seen == [("/v1/models", ((b"a", b"b"),), status)]


@pytest.mark.parametrize("theirs", [b"mine-1", b"x" * 128, b"~!"])
async def test_the_clients_own_id_is_given_back(theirs, caplog):
    """Beside ours, under which engines know the request; the log has both."""
    caplog.set_level(logging.INFO)
    client = Client()
    await tracking(answer)(scope() | {"headers": [(b"x-request-id", theirs)]}, None, client.send)

    headers = dict(client.messages[0]["headers"])
    assert headers[b"x-request-id"] == theirs
    assert headers[b"x-pdrelay-request-id"] == b"pdrelay-1"
    assert lines(caplog)[0].startswith("request_id=pdrelay-1 ")
    assert f" client_id={theirs.decode()!r}" in lines(caplog)[0]


@pytest.mark.parametrize("odd", [b"", b"x" * 129, b"a b", b"a\nb", b"caf\xe9", b"\x00"])
async def test_an_odd_id_is_not_repeated(odd, caplog):
    """It could fill a log, or forge a line of it."""
    caplog.set_level(logging.INFO)
    client = Client()
    await tracking(answer)(scope() | {"headers": [(b"x-request-id", odd)]}, None, client.send)

    headers = dict(client.messages[0]["headers"])
    assert headers[b"x-request-id"] == b"pdrelay-1"
    assert b"x-pdrelay-request-id" not in headers
    assert "client_id" not in lines(caplog)[0]
