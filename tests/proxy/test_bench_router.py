"""The router's benchmark: null engines and load generator notice a wrong byte, a lost leg and a hang-up.

A benchmark that does not notice a wrong answer praises the router that makes the most of them.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from benchmarks.router import engines, load, trial, words
from benchmarks.router.contestants import CONTESTANTS

pytestmark = pytest.mark.edges


@asynccontextmanager
async def pair(**options):
    """One prefill and one decode engine: (what they have counted, their ports)."""
    async with engines.serving(engines.Options(prefill=1, decode=1, **options)) as (all_, ports):
        yield all_.counts, ports["prefill"][0], ports["decode"][0]


async def measured(port, **plan):
    return await load.measure(load.Plan(port=port, **({"connections": 4, "warm": 4, "most": 40} | plan)))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
async def test_every_answer_is_what_the_load_generator_expects(chat, stream):
    async with pair() as (counts, _, port):
        seen = await measured(port, chat=chat, stream=stream, tokens=5)

    assert (seen["done"], seen["faults"]) == (40, {})
    assert (counts.alone, counts.open, counts.wrong) == (44, 0, 0)
    assert seen["tokens"] == 200
    assert seen["first"]["count"] == seen["whole"]["count"] == 40


@pytest.mark.parametrize("size", [64, 100, 513, 4096, 256 << 10])
async def test_prompts_of_any_length_are_recognised(size):
    async with pair() as (counts, _, port):
        seen = await measured(port, prompt=size, most=8)

    assert (seen["done"], seen["faults"], counts.said) == (8, {}, "")


async def test_paced_streams_get_every_token_with_a_step():
    """Lateness is that of the token that came with a step; it is less than a step when nobody is in between."""
    late = []
    while not late or (min(late) >= 0.02 and len(late) < 20):  # the machine may be busy with something else
        async with pair(step_s=0.02) as (counts, _, port):
            seen = await measured(port, tokens=6, step_s=0.02, most=8)

        assert (seen["done"], seen["tokens"], seen["faults"], counts.open) == (8, 48, {}, 0)
        assert seen["late"]["count"] == seen["gaps"]["count"] == 40
        late.append(seen["late"]["p50"])

    assert 0 <= min(late) < 0.02


async def test_who_asks_together_waits_for_the_last_answer():
    """Each wave meets engines that have nothing to do; of 10 requests by 4 connections the last wave has 2."""
    async with pair(prefill_s=0.02) as (counts, _, port):
        crew = load.Crew(load.Plan(port=port, connections=4, together=True), asyncio.get_running_loop())
        await crew.connect()
        waves = []

        def noted(number):
            if counts.open == 0 and crew.open == 1:
                waves.append([])
            waves[-1].append(number)

        take = crew.take
        crew.take = lambda: (number := take()) and (noted(number) or number)
        await crew.phase(10, 60.0)
        await load.end(crew)

    assert (crew.done, dict(crew.faults)) == (10, {})
    assert waves == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


async def test_a_flipped_byte_is_noticed():
    async with pair() as (_, _, port), flipping(port, b"0000002a0001") as flipped:
        seen = await measured(flipped, most=60)

    assert seen["faults"] == {"wrong": 1}
    assert seen["done"] == 59
    assert "other bytes" in seen["said"][0]


@pytest.mark.parametrize("place", [30, 500])
def test_a_flipped_byte_of_a_prompt_is_noticed(place):
    body = bytearray(asked(7, 512))
    body[body.index(b"#bench") + place] ^= 1

    with pytest.raises(words.Corrupt):
        words.read(bytes(body))


async def test_an_answer_that_stops_early_is_noticed():
    async with pair() as (_, _, port), flipping(port, b"[DONE]", cut=True) as cut:
        seen = await measured(cut, warm=0, connections=1, most=3)

    assert seen["done"] == 2
    assert seen["faults"] == {"lost": 1}


async def test_nobody_there_is_a_fault_and_no_endless_wait():
    async with pair() as (_, _, port), flipping(port, b"[DONE]", cut=True, closes=True) as cut:
        seen = await measured(cut, warm=0, connections=1, most=3)

    assert seen["done"] == 0
    assert seen["faults"] == {"lost": 1, "not reached": 1}


async def test_hang_ups_are_counted_on_both_sides():
    async with pair(step_s=0.01) as (counts, _, port):
        seen = await measured(port, tokens=20, hang_after=3, step_s=0.01, warm=0, most=16)
        await until(lambda: counts.open == 0)

    assert (seen["done"], seen["hung_up"], seen["faults"]) == (8, 8, {})
    assert counts.hung_up == 8
    assert seen["tokens"] >= 8 * 20 + 8 * 3


@pytest.mark.parametrize("push", [False, True])
async def test_two_legs_are_told_from_one(push):
    async with pair(push=push) as (counts, prefill, decode):
        answer = await post(prefill, asked(1, 512, max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
        kv = json.loads(answer)["kv_transfer_params"]
        good = await post(decode, asked(1, 512, kv_transfer_params=kv))
        await post(decode, asked(2, 512))

    assert good == words.whole(1, 2, chat=False, size=512)
    assert (counts.prefill, counts.decode, counts.alone, counts.wrong) == (1, 1, 1, 0)
    assert kv["transfer_mode"] == ("push" if push else "pull")


async def test_a_decode_engine_waits_for_what_is_pushed():
    told = {"do_remote_prefill": True, "remote_request_id": "cmpl-r-0", "transfer_id": "t", "transfer_mode": "push"}
    async with pair(push=True) as (counts, prefill, decode):
        waiting = asyncio.create_task(post(decode, asked(1, 512, kv_transfer_params=told)))
        await until(lambda: counts.open == 1)
        assert not waiting.done()
        await post(prefill, asked(1, 512, max_tokens=1, kv_transfer_params={"do_remote_decode": True}))

        assert await waiting == words.whole(1, 2, chat=False, size=512)
    assert (counts.prefill, counts.decode, counts.open, counts.wrong) == (1, 1, 0, 0)


async def test_the_blocks_of_another_request_are_noticed():
    async with pair() as (counts, prefill, decode):
        answer = await post(prefill, asked(1, 512, max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
        kv = json.loads(answer)["kv_transfer_params"]
        await post(decode, asked(2, 512, kv_transfer_params=kv))

    assert (counts.decode, counts.wrong, counts.open) == (0, 1, 0)
    assert "not those of its request" in counts.said


async def test_a_request_to_free_blocks_is_none_for_tokens():
    kv = {"do_remote_prefill": True, "remote_request_id": "cmpl-r-0-00000001"}
    async with pair() as (counts, _, decode):
        await post(decode, json.dumps({"prompt": [0], "max_tokens": 2**31 - 1, "kv_transfer_params": kv}).encode())

    assert (counts.released, counts.decode, counts.wrong, counts.open) == (1, 0, 0, 0)


async def test_a_prefill_leg_that_asks_for_tokens_is_noticed():
    async with pair() as (counts, prefill, _):
        await post(prefill, asked(1, 512, max_tokens=2, kv_transfer_params={"do_remote_decode": True}))

    assert (counts.prefill, counts.wrong, counts.open) == (0, 1, 0)


@pytest.mark.parametrize(
    "legs", [{"prefill": 9}, {"decode": 9}, {"alone": 1}, {"open": 2}, {"wrong": 1, "said": "odd"}]
)
def test_a_router_that_leaves_out_a_leg_is_at_fault(legs):
    seen = {"prefill": 10, "decode": 10, "alone": 0, "wrong": 0, "said": "", "open": 0} | legs
    found = {"asked": 10, "legs": seen, "faults": {}, "said": []}

    trial.check(found, CONTESTANTS["toy"])

    assert found["faults"]


def test_lateness_is_found_though_the_first_tokens_came_late():
    step = 0.5
    arrived = [(2, 11.75), (3, 12.0), (4, 12.25)]  # steps at 11.0, 11.5 and 12.0

    assert load.lateness(arrived, step) == pytest.approx([0.75, 0.5, 0.25])


def asked(number, size, **fields):
    """Return a body with these fields beside those of a client."""
    raw = b"".join(words.request(number, host=b"x", size=size, tokens=2, chat=False, stream=False))
    raw = raw.partition(b"\r\n\r\n")[2]
    return json.dumps(json.loads(raw) | fields).encode()


async def post(port, body):
    """Return the body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nx-request-id: r\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    answer = await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()
    return answer


async def until(is_so):
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def flipping(port, where, *, cut=False, closes=False):
    """A way to an engine on which the first answer with ``where`` in it has a bit flipped there, or ends there."""
    left, tasks = [where], set()

    async def pass_on(reader, writer):
        tasks.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        back = asyncio.create_task(copy(reader, far_writer, lambda data: data))
        try:
            await copy(far_reader, writer, spoilt)
        finally:
            back.cancel()
            for each in (writer, far_writer):
                each.transport.abort()

    def spoilt(data):
        if not left or left[0] not in data:
            return data
        at = data.index(left.pop())
        if closes:
            server.close()
        return data[:at] if cut else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    async def copy(reader, writer, change):
        while data := await reader.read(1 << 16):
            changed = change(data)
            writer.write(changed)
            await writer.drain()
            if len(changed) < len(data):
                return

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
