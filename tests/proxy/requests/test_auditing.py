"""Both legs must have the same prompt: what they count of it is compared, and a difference is never silent."""

import dataclasses
import json

import pytest

from pdrelay_proxy.core.model import Api
from support.scripted import DONE, EVENT, Scripted, call, prefilled, router_of


def usage(count):
    return b'data: {"choices":[],"usage":{"prompt_tokens":%d}}\n\n' % count


def prefill_counting(count, mode):
    async def prefill(leg):
        answer = prefilled(leg, transfer_mode=mode)
        body = json.loads(answer.body) | {"usage": {"prompt_tokens": count}}
        return dataclasses.replace(answer, body=json.dumps(body).encode())

    return prefill


def decode_with(*parts):
    async def decode(_):
        return 200, [*parts]

    return decode


async def served(prefill, decode, *, turns=1, **fields):
    """Return how often two engines differed, and the record of the last request."""
    router = router_of(Scripted(prefill, decode))
    for turn in range(turns):
        client = await router.serve(call(**fields), name=f"r{turn}")
    return dict(router.telemetry.counters.mismatches), client.record


@pytest.mark.parametrize(
    "parts",
    [
        [EVENT, usage(9), DONE],
        [usage(9), usage(9), DONE],
        [EVENT + usage(9) + DONE],
        [usage(9), EVENT, EVENT, DONE],
        [EVENT, EVENT + usage(9) + DONE],
    ],
)
async def test_a_difference_is_told_once(parts):
    """Wherever in the stream it comes to light."""
    told, record = await served(prefill_counting(7, "pull"), decode_with(*parts))

    assert told == {("prefill-0", "decode-0"): 1}
    assert record.error == (
        "prefill-0 counted 7 prompt tokens and decode-0 9: they do not make the same prompt of a request"
    )


@pytest.mark.parametrize("parts", [[EVENT, usage(7), DONE], [EVENT, DONE]])
async def test_the_same_number_or_none_is_no_fault(parts):
    """A stream has no usage unless its client asks for it."""
    told, record = await served(prefill_counting(7, "pull"), decode_with(*parts))

    assert (told, record.error) == ({}, None)


async def test_legs_that_go_out_at_once_are_compared_too():
    """Whichever of them answers first."""
    told, _ = await served(prefill_counting(7, "push"), decode_with(EVENT, usage(9), DONE), turns=2)

    assert told == {("prefill-0", "decode-0"): 2}


def message(said, count):
    usage = b'{"input_tokens":%d,"cache_read_input_tokens":%d}' % (count, 4)
    inside = b'{"message":{"id":"m","usage":%b}}' if said == "message_start" else b'{"delta":{},"usage":%b}'
    return b"event: %b\ndata: %b\n\n" % (said.encode(), inside % usage)


@pytest.mark.parametrize(("count", "differs"), [(3, False), (5, True)])
async def test_streams_of_messages_are_compared_at_their_first_event(count, differs):
    """What P had in its cache is shown to the client in place of D's word, and must not hide that D counts more."""
    usage = {"input_tokens": 7, "cache_read_input_tokens": 0}

    async def prefill(leg):
        answer = prefilled(leg, transfer_mode="pull")
        return dataclasses.replace(answer, body=json.dumps(json.loads(answer.body) | {"usage": usage}).encode())

    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    events = [message("message_start", count), message("message_delta", count), stop]
    router = router_of(Scripted(prefill, decode_with(*events)))
    client = await router.serve(call(Api.MESSAGES, stream=True, max_tokens=9))

    assert client.status == 200
    assert dict(router.telemetry.counters.mismatches) == ({("prefill-0", "decode-0"): 1} if differs else {})


async def test_one_engine_has_nobody_to_differ_from():
    """A request for one engine is not read at all."""
    told, record = await served(prefill_counting(7, "pull"), decode_with(usage(9), DONE), n=2)

    assert (told, record.error) == ({}, None)
