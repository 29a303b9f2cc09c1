"""A pretended engine is only worth something if it is as strict, and fails as well, as a real one."""

import asyncio
import json

import httpx
import msgspec
import pytest

from pdrelay_tools.simulated.engine import Sim
from pdrelay_tools.simulated.rules import expected_text

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "hi", "max_tokens": 4}
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
PREFILL = {"prompt": "hi", "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": ASK}
ID = {"x-request-id": "pdrelay-1"}


def talking_to(sim):
    return httpx.AsyncClient(transport=httpx.ASGITransport(sim), base_url="http://sim")


async def post(sim, body, path=TEXT, headers=ID):
    async with talking_to(sim) as client:
        return await client.post(path, json=body, headers=headers)


async def prefilled():
    """The parameters of a prefilled request, as bytes: a detour through Python would change them."""
    reply = await post(Sim("prefill"), PREFILL)
    return msgspec.json.decode(reply.content, type=dict[str, msgspec.Raw])["kv_transfer_params"]


async def decoded(sim, params, body=BODY, headers=ID):
    raw = msgspec.json.encode(body | {"kv_transfer_params": params})
    async with talking_to(sim) as client:
        return await client.post(TEXT, content=raw, headers=headers)


@pytest.mark.parametrize(
    ("path", "body", "prefix", "kind"),
    [
        (TEXT, BODY, "cmpl-", "text_completion"),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}, "chatcmpl-", "chat.completion"),
    ],
)
async def test_answers_have_vllms_shape(path, body, prefix, kind):
    """Ids are made of the X-Request-Id, and both forms hold the same text."""
    whole = (await post(Sim("decode"), body, path)).json()
    stream = await post(Sim("decode"), body | {"stream": True, "stream_options": {"include_usage": True}}, path)

    assert (whole["id"], whole["object"]) == (f"{prefix}pdrelay-1", kind)
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["choices"][0]["finish_reason"] == "length"
    *events, done, end = stream.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["id"] for chunk in chunks} == {whole["id"]}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    said = [choice.get("text", choice.get("delta", {}).get("content")) for c in chunks[:-1] for choice in c["choices"]]
    assert "".join(said) == expected_text(body)


async def test_the_text_depends_on_the_prompt_and_on_nothing_else():
    """So that a wrong prompt shows as a wrong text, on whichever engine."""
    texts = [
        (await post(Sim("decode"), body)).json()["choices"][0]["text"] for body in (BODY, BODY, BODY | {"prompt": "ho"})
    ]

    assert texts[0] == texts[1] == expected_text(BODY)
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_transfer_params": {}}, "do_remote_decode"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "do_remote_decode"),
        ({"max_tokens": 2}, "one token"),
        ({"max_completion_tokens": 2}, "one token"),
        ({"min_tokens": 0}, "one token"),
        ({"stream": True}, "not be streamed"),
        ({"stream_options": {}}, "not be streamed"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"n": 2}, "one prompt"),
    ],
)
async def test_a_prefill_leg_must_ask_for_nothing_else(change, says):
    """Each of these has cost somebody a wrong text or an engine."""
    sim = Sim("prefill")
    reply = await post(sim, PREFILL | change)

    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert sim.violations == [reply.json()["error"]["message"]]


async def test_parameters_must_arrive_as_they_left():
    """Down to the blanks: what is between two engines is none of the router's business."""
    params = bytes(await prefilled())
    changes = [(b'"tp_size": 1', b'"tp_size": 2'), (b'"tp_size": ', b'"tp_size":'), (params, b"{}")]
    for before, after in changes:
        sim = Sim("decode")
        reply = await decoded(sim, msgspec.Raw(params.replace(before, after)))

        assert reply.status_code == 400
        assert sim.violations == ["the kv_transfer_params were changed on their way"]


async def test_parameters_belong_to_one_request():
    """To its prompt and everything that shapes it, to its id, and once."""
    params = await prefilled()
    cases = [
        (BODY | {"prompt": "ho"}, ID, "the kv_transfer_params belong to another request"),
        (BODY | {"temperature": 0.5}, ID, "the kv_transfer_params belong to another request"),
        (BODY, {"x-request-id": "pdrelay-2"}, "the two legs have different X-Request-Ids"),
    ]
    for body, headers, says in cases:
        sim = Sim("decode")
        assert (await decoded(sim, params, body, headers)).status_code == 400
        assert sim.violations == [says]

    sim = Sim("decode")
    replies = [await decoded(sim, params) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 400]
    assert sim.violations == ["the kv_transfer_params were used twice"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "raw",
    [
        b"junk",
        b"[]",
        b"{}",
        b'{"prompt":"a","max_tokens":"many"}',
        b'{"prompt":"a","n":[1],"stream":true}',
        b'{"prompt":"a","n":-1}',
        b'{"prompt":"a","stream":true,"stream_options":[]}',
        b'{"prompt":"a","stream":true,"stream_options":"x"}',
    ],
)
async def test_what_is_no_request_is_refused(role, raw):
    """Like an engine would."""
    async with talking_to(Sim(role)) as client:
        reply = await client.post(TEXT, content=raw)

    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == 400


@pytest.mark.parametrize("more", [{"max_tokens": 10**6}, {"n": 10**6}, {"prompt": ["a", "b"], "max_tokens": 150_000}])
async def test_there_is_room_for_so_many_tokens_of_all_answers(more):
    """Whatever makes them many: it would compute them, in the memory of who started it."""
    async with talking_to(Sim("decode")) as client:
        reply = await client.post(TEXT, json={"prompt": "a"} | more)

    assert (reply.status_code, "larger than" in reply.text) == (400, True)


@pytest.mark.parametrize("most", [0, -1])
async def test_no_answer_is_without_a_token(most):
    """vLLM refuses to make such a one."""
    reply = await post(Sim("decode"), BODY | {"max_tokens": most})

    assert (reply.status_code, "at least 1" in reply.text) == (400, True)


async def test_faults_are_set_and_cleared_from_outside():
    """And hit as many requests as they are told to."""
    sim = Sim("decode")
    async with talking_to(sim) as client:
        assert (await client.post("/sim/faults", json={"kind": "status", "status": 503, "times": 1})).status_code == 200
        statuses = [(await client.post(TEXT, json=BODY)).status_code for _ in range(2)]
        await client.post("/sim/faults", json={"kind": "status", "body": "<html>"})
        last = await client.post(TEXT, json=BODY)
        await client.post("/sim/faults", content=b"null")
        assert (await client.post("/sim/faults", json={"kind": "magic"})).status_code == 400
        log = (await client.get("/sim/log")).json()

    assert statuses == [503, 200]
    assert (last.status_code, last.text) == (500, "<html>")
    assert [entry["state"] for entry in log["requests"]] == ["done"] * 3
    assert json.loads(log["requests"][0]["body"]) == BODY
    assert (await post(sim, BODY)).status_code == 200


PUSH_ASK = PREFILL | {"kv_transfer_params": ASK | {"transfer_id": "xfer-1"}}


async def told(sim):
    """What a decode engine is told of a prefill sim before it has answered."""
    params = (await post(sim, PUSH_ASK)).json()["kv_transfer_params"]
    del params["remote_block_ids"], params["of_a_later_version"]
    return params | {"remote_request_id": "cmpl-pdrelay-1-0", "transfer_id": "xfer-1"}


async def test_a_pushing_prefill_engine_says_so_and_wants_a_name_for_the_transfer():
    """As the engines do."""
    sim = Sim("prefill", mode="push")

    assert (await told(sim))["transfer_mode"] == "push"
    assert (await post(sim, PREFILL)).status_code == 400
    assert sim.violations == ["a prefill leg must name its transfer"]


async def test_a_decode_engine_waits_for_what_is_pushed_to_it():
    """Only for the prompt of this very request, from this very engine."""
    pushed = {}
    prefill, decode = Sim("prefill", mode="push", pushed=pushed), Sim("decode", pushed=pushed)
    params = await told(prefill)
    pushed.clear()
    waiting = asyncio.create_task(post(decode, BODY | {"kv_transfer_params": params}))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await post(prefill, PUSH_ASK)

    assert (await waiting).status_code == 200
    assert not decode.violations
    assert not pushed


async def test_a_push_for_another_prompt_is_noticed():
    """It would be a wrong text with status 200."""
    pushed = {}
    prefill, decode = Sim("prefill", mode="push", pushed=pushed), Sim("decode", pushed=pushed)
    params = await told(prefill)
    await post(decode, BODY | {"prompt": "ho", "kv_transfer_params": params})

    assert decode.violations == ["the KV cache that was pushed belongs to another request"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(
            ({name: None}, name)
            for name in ("remote_engine_id", "remote_host", "remote_port", "tp_size", "transfer_id")
        ),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_request_id": "cmpl-other-0"}, "does not know this request"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
    ],
)
async def test_a_push_leg_that_would_kill_an_engine_is_a_violation(change, says):
    """Or would have it wait for ever."""
    sim = Sim("decode")
    params = await told(Sim("prefill", mode="push")) | change
    response = await post(sim, BODY | {"kv_transfer_params": params})

    assert response.status_code == 400
    assert says in sim.violations[0]
