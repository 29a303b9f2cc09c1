"""What an operator sends."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request

from pdrelay_proxy.api.operator_bodies import read_body
from pdrelay_proxy.errors import BodyTooLarge


def request(receive, **headers):
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": pairs}, receive)


def receiving(*messages):
    """A client that sends these, one by one, and then nothing more."""
    left = list(messages)

    async def receive():
        if left:
            return left.pop(0)
        return await asyncio.Event().wait()

    receive.left = left
    return receive


def part(body, more):
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


async def test_a_body_is_put_together():
    """It comes in as many parts as the network likes."""
    receive = receiving(part(b"ab", True), part(b"", True), {"type": "http.request", "body": b"c"})

    assert await read_body(request(receive), limit=3) == b"abc"


async def test_a_body_that_says_it_is_too_long_is_not_read():
    """Also not asked for: a client that waits for 100-continue never sends it."""
    receive = receiving(part(b"abcd", False))
    with pytest.raises(BodyTooLarge, match="4 bytes, and 3 is the most"):
        await read_body(request(receive, content_length="4"), limit=3)

    assert receive.left


@pytest.mark.parametrize("headers", [{}, {"content_length": "banana"}, {"content_length": "3"}])
async def test_a_body_that_turns_out_too_long_is_counted_while_it_is_read(headers):
    """Nothing beyond the limit is kept, however much there is to come."""
    receive = receiving(part(b"ab", True), part(b"cd", True), part(b"ef", False))
    with pytest.raises(BodyTooLarge, match="more than 3 bytes"):
        await read_body(request(receive, **headers), limit=3)

    assert len(receive.left) == 1


async def test_a_client_may_hang_up_while_it_sends():
    """There is nobody to answer."""
    with pytest.raises(ClientDisconnect):
        await read_body(request(receiving(part(b"a", True), GONE)), limit=3)
