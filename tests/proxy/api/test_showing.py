"""A reply as it goes to the client, message by message."""

import json

import pytest

from xpyd_proxy.api.showing import show
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Api, RequestId
from xpyd_proxy.errors import EngineError, OutOfTime
from xpyd_proxy.relay import Reply


async def shown(path, *parts):
    """Show a stream whose rest is these parts; an exception among them is raised."""
    sent, journey = [], Journey(RequestId("r"))

    async def rest():
        for part in parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def send(message):
        sent.append(message)

    await show(Reply("text/event-stream", b"first\n\n", rest()), journey, path, send)
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return journey, b"".join(message["body"] for message in sent[1:])


async def test_a_stream_goes_out_piece_by_piece():
    """And then the journey is over, whatever is still tidied up."""
    journey, body = await shown(Api.CHAT, b"second\n\n", b"data: [DONE]\n\n")

    assert body == b"first\n\nsecond\n\ndata: [DONE]\n\n"
    assert journey.answered
    assert journey.fault is None


@pytest.mark.parametrize("error", [EngineError("decode-0 broke off"), OutOfTime("too long")])
@pytest.mark.parametrize(
    ("path", "name", "at"),
    [
        (Api.COMPLETIONS, None, ("error", "message")),
        (Api.CHAT, None, ("error", "message")),
        ("/v1/audio/transcriptions", None, ("error", "message")),
        (Api.RESPONSES, "error", ("message",)),
        (Api.MESSAGES, "error", ("error", "message")),
    ],
)
async def test_a_stream_that_fails_says_so_in_the_words_of_its_api(path, name, at, error):
    """Each library looks for its own sort of error, and none may take half an answer for all of it."""
    journey, body = await shown(path, error)

    last = body.decode().split("\n\n")[-2].strip()
    assert last.startswith("data: " if name is None else f"event: {name}\ndata: ")
    said = json.loads(last.partition("data: ")[2])
    for key in at:
        said = said[key]
    assert said == str(error) == journey.fault
    assert b"[DONE]" not in body
