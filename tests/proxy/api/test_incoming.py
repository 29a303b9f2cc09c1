"""What a client sends, and when it goes."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from xpyd_proxy.api.incoming import passed_on, rank_of, read_body, require_form, require_json, until_hung_up
from xpyd_proxy.errors import BadRequest, BodyTooLarge, UnsupportedMedia


def scope(**headers):
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": pairs}


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

    assert await read_body(scope(), receive, limit=3) == b"abc"


async def test_a_body_that_says_it_is_too_long_is_not_read():
    """Also not asked for: a client that waits for 100-continue never sends it."""
    receive = receiving(part(b"abcd", False))
    with pytest.raises(BodyTooLarge, match="4 bytes, and 3 is the most"):
        await read_body(scope(content_length="4"), receive, limit=3)

    assert receive.left


@pytest.mark.parametrize("headers", [{}, {"content_length": "banana"}, {"content_length": "3"}])
async def test_a_body_that_turns_out_too_long_is_counted_while_it_is_read(headers):
    """Nothing beyond the limit is kept, however much there is to come."""
    receive = receiving(part(b"ab", True), part(b"cd", True), part(b"ef", False))
    with pytest.raises(BodyTooLarge, match="more than 3 bytes"):
        await read_body(scope(**headers), receive, limit=3)

    assert len(receive.left) == 1


async def test_a_client_may_hang_up_while_it_sends():
    """There is nobody to answer."""
    with pytest.raises(ClientDisconnect):
        await read_body(scope(), receiving(part(b"a", True), GONE), limit=3)


@pytest.mark.parametrize("declared", [None, "application/json", "Application/JSON ; charset=utf-8"])
def test_json_may_be_declared_or_not(declared):
    """Some clients say nothing."""
    require_json(scope(**({"content_type": declared} if declared else {})))


@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", "application/json5", "\xff"])
def test_another_type_is_not_guessed_at(declared):
    """And the answer says what it was."""
    with pytest.raises(UnsupportedMedia, match="must be application/json, not"):
        require_json(scope(content_type=declared))


def test_repeated_headers_are_all_passed_on():
    """It is for the engine to judge them."""
    headers = [(b"tracestate", b"a=1"), (b"host", b"x"), (b"tracestate", b"b=2")]

    assert passed_on({"type": "http", "headers": headers}) == (headers[0], headers[2])


class Work:
    """Something that takes a while."""

    def __init__(self):
        self.state = "new"
        self.go = asyncio.Event()

    async def run(self):
        try:
            await self.go.wait()
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "dropped"
            raise


async def test_work_is_dropped_when_the_client_hangs_up():
    """And the caller learns it only when everything the work had opened is closed."""
    work = Work()
    with pytest.raises(ClientDisconnect):
        await until_hung_up({}, receiving(part(b"", False), GONE), work.run())

    assert work.state == "dropped"


async def test_work_that_is_done_is_done():
    """The watch over the client ends with it."""
    work = Work()
    work.go.set()
    await until_hung_up({}, receiving(), work.run())

    assert work.state == "done"
    assert len(asyncio.all_tasks()) == 1


async def test_what_goes_wrong_in_the_work_is_raised():
    """It becomes the client's answer."""

    async def fail():
        raise BodyTooLarge("x")

    with pytest.raises(BodyTooLarge):
        await until_hung_up({}, receiving(), fail())


async def test_a_server_that_stops_drops_the_work():
    """And waits for what it closes."""
    work = Work()
    task = asyncio.create_task(until_hung_up({}, receiving(), work.run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert work.state == "dropped"
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_has_its_whole_answer_may_go():
    """It is not one that hung up, and what is left to tidy up is tidied up."""
    work = Work()
    task = asyncio.create_task(until_hung_up({}, receiving(GONE), work.run(), answered=lambda: True))
    await asyncio.sleep(0.01)
    work.go.set()
    await task

    assert work.state == "done"


def test_a_form_says_where_its_parts_end():
    """So its declaration goes to the engine as it came."""
    declared = "Multipart/Form-Data; boundary=x"

    assert require_form(scope(content_type=declared)) == declared.encode()
    for other in ({}, {"content_type": "application/json"}, {"content_type": "multipart/mixed"}):
        with pytest.raises(UnsupportedMedia, match=r"multipart/form-data"):
            require_form(scope(**other))


@pytest.mark.parametrize(("text", "rank"), [("0", 0), (" 12 ", 12), ("", None)])
def test_a_client_may_ask_for_a_rank(text, rank):
    """An empty header asks for nothing."""
    assert rank_of(scope(x_data_parallel_rank=text)) == rank


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "9" * 10, "1_0"])
def test_a_rank_is_a_number(text):
    """The engine would say so too, after the prefill."""
    with pytest.raises(BadRequest, match="X-data-parallel-rank"):
        rank_of(scope(x_data_parallel_rank=text))
