"""Where the time of a request goes, as histograms and the log tell it."""

import json
import logging

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.log_formats import FACTS
from pdrelay_proxy.settings import Settings
from support.greedy import events
from support.scripted import DONE, EVENT, Scripted, call, pulled_prefill, router_of, until

PATH = Api.COMPLETIONS.value


class Clock:
    """One that engines move."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def after(self, seconds, part):
        """A part of a stream that comes so much later; an error breaks it off."""

        async def come():
            self.now += seconds
            if isinstance(part, Exception):
                raise part
            return part

        return come()


def seen(router, name, *labels):
    """How many values a histogram has, and their sum."""
    found = getattr(router.telemetry.counters, name).by_key.get((PATH, *labels))
    return None if found is None else (sum(found.counts), pytest.approx(found.total))


@pytest.fixture
def clock():
    return Clock()


def engines_of(clock, *parts, prefill_s=0.25):
    async def prefill(leg):
        clock.now += prefill_s
        return await pulled_prefill(leg)

    async def decode(_):
        return 200, [clock.after(seconds, part) for seconds, part in parts]

    return Scripted(prefill, decode)


async def test_a_stream_tells_its_first_token_each_pause_and_its_end(clock, caplog):
    """As its client gets them: from the head of the request on."""
    caplog.set_level(logging.INFO, "pdrelay.access")
    router = router_of(engines_of(clock, (0.5, EVENT), (0.125, EVENT), (2.0, EVENT), (0.0, DONE)), clock=clock)
    client = await router.serve()

    assert client.body == EVENT * 3 + DONE
    assert seen(router, "ttft") == (1, 0.75)
    assert seen(router, "inter_token") == (3, 2.125)
    assert seen(router, "durations", "ok") == (1, 2.875)
    assert seen(router, "queue_times") == (1, 0.0)
    counters = router.telemetry.counters
    assert [
        times.by_key[(name,)].total
        for times, name in ((counters.prefill_times, "prefill-0"), (counters.decode_ttft, "decode-0"))
    ] == [0.25, 0.5]
    (facts,) = [getattr(record, FACTS) for record in caplog.records]
    assert [facts[f"{name}_ms"] for name in ("duration", "ttft", "prefill", "queue")] == [2875.0, 750.0, 250.0, 0.0]


async def test_the_pause_of_a_stream_that_another_engine_goes_on_with_is_one_of_its_pauses(clock):
    """The client waited for it."""
    breaks = [True]

    async def decode(leg):
        parts = [clock.after(0.25, part) for part in events(json.loads(leg.body), name="cmpl-r")]
        if breaks:
            breaks.clear()
            for part in parts[4:]:
                part.close()
            return 200, [*parts[:4], clock.after(1.0, EngineError("broke off"))]
        return 200, parts

    router = router_of(Scripted(pulled_prefill, decode), y=2, clock=clock, resume_streams=True)
    client = await router.serve(call(stream=True, max_tokens=12, temperature=0))

    assert client.response.is_whole
    assert len(client.record.retries) == 1
    reads = 12 + 1  # tokens, and the end of the stream
    assert seen(router, "ttft") == (1, 0.25)
    count, seconds = seen(router, "inter_token")
    assert seconds == client.record.duration_s - 0.25
    assert count == reads - 1


async def test_the_wait_in_the_queue_is_timed_whatever_comes_of_it(clock):
    """One gets its turn after a second, and one leaves after that; who is refused at once did not wait."""
    held = []

    async def prefill(leg):
        await until(lambda: leg.headers in held or len(held) > 0)
        return await pulled_prefill(leg)

    async def decode(_):
        return 200, [EVENT, DONE]

    router = router_of(
        Scripted(prefill, decode), clock=clock, limits=Settings(max_concurrency=1, max_queue=2, max_queue_wait_s=60)
    )
    first, second, third, refused = [router.start(name=name) for name in "abcd"]
    await until(lambda: refused.is_over)
    clock.now += 1.0
    third.hang_up()
    held.append(True)
    for client in (first, second, third, refused):
        await client.end()

    clients = (first, second, third, refused)
    assert [client.record.queue_s for client in clients] == [0.0, 1.0, 1.0, None]
    assert [client.record.admitted_s for client in clients] == [0.0, 1.0, None, None]
    assert seen(router, "queue_times") == (3, 2.0)
    outcomes = ("ok", "client_disconnected", "server_error")
    assert [seen(router, "durations", outcome)[0] for outcome in outcomes] == [2, 1, 1]
    assert router.is_idle()
