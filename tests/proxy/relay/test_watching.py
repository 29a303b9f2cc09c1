"""What watchers are told: load, health and metrics all stand on it."""

import asyncio

import pytest

from support.scripted import EVENT, Scripted, call, good_decode, prefilled, relay_of
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import Answer, RequestId
from xpyd_proxy.core.retries import Failure
from xpyd_proxy.errors import EngineError, EngineTimeout, ProxyError

ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":400}}'


class Notes:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def began(self, instance, request, /):
        self.told.append(("began", instance.id, request))

    def answered(self, instance, request, seconds, /):
        self.told.append(("answered", instance.id, request))

    def ended(self, instance, request, failure, /):
        self.told.append(("ended", instance.id, request, failure))


async def pulled(leg):
    return prefilled(leg, transfer_mode="pull")


async def told_of(prefill, decode, *, leave=False, retries=0, **options):
    """Serve a request, to its end or not, and return what a watcher was told."""
    notes = Notes()
    engines = Scripted(prefill, decode)
    relay = relay_of(engines, retries=retries, watchers=(notes,), **options)
    try:
        async with relay.serve(call(), Journey(RequestId("r"))) as reply:
            async for _ in reply.rest:
                if leave:
                    break
    except ProxyError:
        pass
    return notes.told


async def test_both_legs_of_a_good_request():
    """The decode leg ends when its stream does."""
    assert await told_of(pulled, good_decode) == [
        ("began", "prefill-0", "r"),
        ("answered", "prefill-0", "r"),
        ("ended", "prefill-0", "r", None),
        ("began", "decode-0", "r"),
        ("answered", "decode-0", "r"),
        ("ended", "decode-0", "r", None),
    ]


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (EngineError("down", reached=False), Failure.UNREACHABLE),
        (EngineError("broke off"), Failure.BROKEN),
        (EngineTimeout("slow"), Failure.SILENT),
        (Answer(500, "", ERROR), Failure.ERRED),
        (Answer(400, "application/json", ERROR), Failure.REFUSED),
        (Answer(200, "", b"{}"), Failure.BROKEN),
    ],
)
async def test_a_prefill_that_fails_says_how(outcome, failure):
    """Whose fault it is decides who is blamed for it."""

    async def prefill(_):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert await told_of(prefill, good_decode) == [("began", "prefill-0", "r"), ("ended", "prefill-0", "r", failure)]


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (EngineError("down", reached=False), Failure.UNREACHABLE),
        ((500, [ERROR]), Failure.ERRED),
        ((404, [ERROR]), Failure.REFUSED),
        ((200, []), Failure.BROKEN),
    ],
)
async def test_a_decode_that_fails_before_its_first_event_was_never_answered(outcome, failure):
    """A time to the first token of a leg that has none would be a lie."""

    async def decode(_):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    told = await told_of(pulled, decode)

    assert told[3:] == [("began", "decode-0", "r"), ("ended", "decode-0", "r", failure)]


async def test_a_stream_that_breaks_off_has_failed_although_it_was_answered():
    """Whoever passes it on handles the exception; the watchers must hear of it all the same."""

    async def decode(_):
        return 200, [EVENT, EngineError("broke off")]

    told = await told_of(pulled, decode)

    assert told[-2:] == [("answered", "decode-0", "r"), ("ended", "decode-0", "r", Failure.BROKEN)]


async def test_a_client_that_leaves_is_nobodys_failure():
    """Neither in the middle of a stream, nor while the prefill runs."""

    async def decode(_):
        return 200, [EVENT, EVENT, EVENT]

    assert (await told_of(pulled, decode, leave=True))[-1] == ("ended", "decode-0", "r", None)

    notes = Notes()

    async def never(_):
        await asyncio.Event().wait()

    async def serve():
        async with relay_of(Scripted(never, decode), watchers=(notes,)).serve(call(), Journey(RequestId("r"))):
            pass

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait((serving,))
    assert notes.told == [("began", "prefill-0", "r"), ("ended", "prefill-0", "r", None)]


async def test_every_try_is_a_leg_of_its_own():
    """A retry has another id, except where only the decode engine is replaced."""
    down = [EngineError("down", reached=False), (500, [ERROR])]

    async def decode(leg):
        if down:
            outcome = down.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        return await good_decode(leg)

    told = await told_of(pulled, decode, retries=2, y=2)

    began = [one[1:] for one in told if one[0] == "began"]
    assert began[:4] == [("prefill-0", "r"), ("decode-0", "r"), ("decode-1", "r"), ("prefill-0", "r-r2")]
    assert sorted(began) == sorted(one[1:3] for one in told if one[0] == "ended")
    assert [one[3] for one in told if one[0] == "ended"] == [None, Failure.UNREACHABLE, Failure.ERRED, None, None]


@pytest.mark.parametrize("error", [b'data: {"error":{"code":500}}\n\n', b'event: error\ndata: {"type":"error"}\n\n'])
async def test_an_engine_that_says_it_failed_has_failed_although_nobody_reads_on(error):
    """Most clients hang up at the error; it is the engine's all the same."""

    async def decode(_):
        return 200, [EVENT, error, b"data: [DONE]\n\n"]

    notes = Notes()
    relay = relay_of(Scripted(pulled, decode), watchers=(notes,))
    async with relay.serve(call(), Journey(RequestId("r"))) as reply:
        await anext(reply.rest)

    assert notes.told[-1] == ("ended", "decode-0", "r", Failure.BROKEN)
