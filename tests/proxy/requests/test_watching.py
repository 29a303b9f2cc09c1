"""What is told of legs: load, health, metrics and spans all stand on it."""

import pytest

from pdrelay_proxy.core.model import EngineResponse
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.errors import EngineError, EngineTimeout
from support.scripted import (
    EVENT,
    Noted,
    Scripted,
    failing,
    good_decode,
    never,
    pulled_prefill,
    request_id,
    router_of,
    until,
)

ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":400}}'


class Watched:
    """A router, and what it has told of the legs of its requests."""

    def __init__(self, prefill, decode, **options):
        self.notes = Noted()
        self.engines = Scripted(prefill, decode)
        self.router = router_of(self.engines, spans=self.notes, **{"retries": 0, **options})

    @property
    def told(self):
        """Without what is told of whole requests."""
        return [told for told in self.notes.told if told[0] != "over"]

    @property
    def legs(self):
        """What the metrics count: legs by engine and outcome."""
        return {key[::2]: count for key, count in self.router.telemetry.counters.legs.items()}

    @property
    def answers(self):
        """How many good answers of each engine were timed."""
        seen = self.router.telemetry.counters
        return {
            key[0]: sum(found.counts)
            for times in (seen.prefill_times, seen.decode_ttft)
            for key, found in times.by_key.items()
        }

    async def served(self):
        client = await self.router.serve()
        assert self.router.is_idle()
        return client


async def test_both_legs_of_a_good_request():
    """The decode leg ends when its stream does."""
    watched = Watched(pulled_prefill, good_decode)
    await watched.served()

    assert watched.told == [
        ("began", "prefill-0", "r"),
        ("answered", "prefill-0", "r"),
        ("ended", "prefill-0", "r", None),
        ("began", "decode-0", "r"),
        ("answered", "decode-0", "r"),
        ("ended", "decode-0", "r", None),
    ]
    assert watched.legs == {("prefill-0", "ok"): 1, ("decode-0", "ok"): 1}
    assert watched.answers == {"prefill-0": 1, "decode-0": 1}
    assert watched.notes.told[-1] == ("over", "r", 200)


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (EngineError("down", reached=False), Failure.UNREACHABLE),
        (EngineError("broke off"), Failure.BAD_RESPONSE),
        (EngineTimeout("slow"), Failure.TIMEOUT),
        (EngineResponse(500, "", ERROR), Failure.HTTP_5XX),
        (EngineResponse(400, "application/json", ERROR), Failure.REFUSED),
        (EngineResponse(200, "", b"{}"), Failure.NO_KV_PARAMS),
        (EngineResponse(200, "", b"no JSON"), Failure.BAD_RESPONSE),
        (EngineResponse(404, "", b""), Failure.NO_SUCH_PATH),
        (EngineResponse(401, "", b""), Failure.WRONG_KEY),
    ],
)
async def test_a_prefill_that_fails_says_how(outcome, failure):
    """Whose fault it is decides who is blamed for it."""
    watched = Watched(failing(outcome, then=pulled_prefill), good_decode)
    await watched.served()

    assert [told for told in watched.told if told[0] != "answered"] == [
        ("began", "prefill-0", "r"),
        ("ended", "prefill-0", "r", failure),
    ]
    assert watched.legs == {("prefill-0", failure): 1}
    assert watched.answers == {}


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (EngineError("down", reached=False), Failure.UNREACHABLE),
        ((500, [ERROR]), Failure.HTTP_5XX),
        ((404, [ERROR]), Failure.REFUSED),
        ((200, []), Failure.BAD_RESPONSE),
    ],
)
async def test_a_decode_that_fails_before_its_first_event_was_never_answered(outcome, failure):
    """A time to the first token of a leg that has none would be a lie."""
    watched = Watched(pulled_prefill, failing(outcome, then=good_decode))
    client = await watched.served()

    assert [told for told in watched.told if told[0] != "answered"][2:] == [
        ("began", "decode-0", "r"),
        ("ended", "decode-0", "r", failure),
    ]
    assert watched.legs == {("prefill-0", "ok"): 1, ("decode-0", failure): 1}
    assert watched.answers == {"prefill-0": 1}
    assert client.record.ttft_s is None


async def test_a_client_that_leaves_is_nobodys_failure():
    """Neither in the middle of a stream, nor while the prefill runs."""

    async def decode(_):
        return 200, [EVENT, EVENT, EVENT, never()]

    watched = Watched(pulled_prefill, decode)
    client = watched.router.start()
    await until(lambda: client.body == EVENT * 3)
    client.hang_up()
    assert watched.told[-1] == ("ended", "decode-0", "r", None)

    watched = Watched(never, decode)
    client = watched.router.start()
    await until(lambda: watched.told)
    client.hang_up()
    assert watched.told == [("began", "prefill-0", "r"), ("ended", "prefill-0", "r", None)]
    assert watched.legs == {("prefill-0", "ok"): 1}
    assert watched.answers == {}
    assert watched.router.is_idle()


async def test_every_try_is_a_leg_of_its_own():
    """A retry has another id, except where only the decode engine is replaced."""
    down = [EngineError("down", reached=False), (500, [ERROR])]
    watched = Watched(pulled_prefill, failing(*down, then=good_decode), retries=2, y=2)
    await watched.served()

    sent = [(leg.instance.id, request_id(leg)) for leg in watched.engines.legs]
    ended = [one[1:] for one in watched.told if one[0] == "ended"]
    assert sent[:4] == [("prefill-0", "r"), ("decode-0", "r"), ("decode-1", "r"), ("prefill-0", "r-r2")]
    assert [one[0] for one in ended] == [engine for engine, _ in sent]
    assert [one[2] for one in ended] == [None, Failure.UNREACHABLE, Failure.HTTP_5XX, None, None]


@pytest.mark.parametrize("error", [b'data: {"error":{"code":500}}\n\n', b'event: error\ndata: {"type":"error"}\n\n'])
async def test_an_engine_that_says_it_failed_has_failed_although_nobody_reads_on(error):
    """Most clients hang up at the error; it is the engine's all the same."""

    async def decode(_):
        return 200, [EVENT, error, never()]

    watched = Watched(pulled_prefill, decode)
    client = watched.router.start()
    await until(lambda: client.body == EVENT + error)
    client.hang_up()

    assert watched.legs == {("prefill-0", "ok"): 1, ("decode-0", "bad_response"): 1}
    assert watched.router.is_idle()
