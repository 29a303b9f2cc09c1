"""The whole router, from a client's request to its bytes, in front of engines that check every rule of the two legs."""

import json
import re
from dataclasses import replace

import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.errors import AddressError, AlreadyKnown, ConfigError
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from pdrelay_tools.simulated.rules import expected_text
from support.sim import router, sims

TEXT = ("/v1/completions", {"prompt": "once upon a time", "max_tokens": 5})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5})
JSON = {"content-type": "application/json"}
ERROR = {"message", "type", "param", "code"}


def text_of(response):
    """The generated text, whatever the API and whether it was streamed."""
    if "text/event-stream" not in response.headers["content-type"]:
        choice = response.json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


# An engine that is probed later than the others has no share of the requests before that.
UNPROBED = Settings(health_check_interval_s=0.0)


async def test_both_legs_have_one_fresh_id_which_the_client_learns():
    """Engines match the halves of a request by it: a client's own id could match another request's half."""
    engines = sims()
    ids = []
    async with router(engines) as client:
        for _ in range(2):
            response = await client.post(TEXT[0], json=TEXT[1], headers={"X-Request-Id": "mine"})
            ids.append(response.headers["x-pdrelay-request-id"])
            assert response.headers["x-request-id"] == "mine"

    legs = [[entry.headers["x-request-id"] for entry in engines[name].log] for name in ("p0", "d0")]
    assert legs == [ids, ids]
    assert len(set(ids)) == 2
    assert all(one.startswith("pdrelay-") and len(one) == 40 for one in ids)


@pytest.mark.parametrize("named", [{"x-claude-code-session-id": "s"}, {"x-task": "s"}, {"prompt_cache_key": "s"}])
async def test_a_session_stays_on_its_engines(named):
    """Whatever its client calls it; explain says the same, and other sessions go elsewhere."""
    engines = sims(4, 4)
    headers = {name: value for name, value in named.items() if "-" in name}
    body = TEXT[1] | {name: value for name, value in named.items() if "-" not in name}
    chosen = {"prefill_policy": PolicyName.SESSION, "decode_policy": PolicyName.SESSION, "session_names": ("X-Task",)}
    async with router(engines, replace(UNPROBED, admin_key="a", **chosen)) as client:
        answers = [await client.post(TEXT[0], json=body, headers=headers) for _ in range(8)]
        others = [await client.post(TEXT[0], json=TEXT[1] | {"user": f"u{number}"}) for number in range(20)]
        question = {"path": TEXT[0], "body": body, "headers": headers}
        said = await client.post("/instances/explain", json=question, headers={"x-api-key": "a"})

    pairs = [tuple(part.partition(";dur")[0] for part in each.headers["server-timing"].split(", ")) for each in answers]
    assert len(set(pairs)) == 1
    assert [said.json()[leg] in pairs[0][number] for number, leg in enumerate(("prefill", "decode"))] == [True, True]
    assert len({each.headers["server-timing"].partition(";dur")[0] for each in others}) > 1


async def test_a_body_reaches_a_single_engine_as_it_was():
    """There is nothing to add to it, and so nothing is touched."""
    raw = b'{"prompt":["a","b"],"max_tokens":1,"temperature":0.10,"x":1e400}'
    engines = sims()
    async with router(engines) as client:
        await client.post("/v1/completions", content=raw, headers={"content-type": "application/json; charset=utf-8"})

    assert engines["d0"].log[0].body == raw.decode()


@pytest.mark.parametrize("private", ["kv_transfer_params", "ec_transfer_params"])
async def test_a_client_cannot_name_remote_blocks(private):
    """Such a body has killed real engines; it must reach none."""
    engines = sims()
    async with router(engines) as client:
        for body in ({private: {"do_remote_prefill": True}}, {"vllm_xargs": {private: "x"}, "n": 2}):
            response = await client.post(TEXT[0], json=TEXT[1] | body)
            assert response.status_code == 400
            assert private in response.json()["error"]["param"]

    assert not any(sim.log for sim in engines.values())


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"not json", {}, 400),
        (b"[]", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": "application/jsonish"}, 415),
        (b"x" * 101, {}, 413),
        (b"{}", {"content-length": "101"}, 413),
    ],
)
async def test_bad_input_is_refused_before_any_engine_sees_it(content, headers, status):
    """In the shape that OpenAI clients understand, with a sentence."""
    engines = sims()
    async with router(engines, Settings(max_body_bytes=100)) as client:
        response = await client.post("/v1/completions", content=content, headers=JSON | headers)

    assert response.status_code == status
    assert response.json()["error"].keys() == ERROR
    assert response.json()["error"]["code"] == status
    assert response.json()["error"]["message"]
    assert "x-request-id" in response.headers
    assert not any(sim.log for sim in engines.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_of_an_engine_have_a_status_and_name_the_instance(stream):
    """Nothing answers 200 when a leg failed, and nothing tells a client an address."""
    cases = [
        ("p0", SimulatedFault(FaultKind.STATUS, status=500), 502, "prefill-0"),
        ("p0", SimulatedFault(FaultKind.STATUS, status=503), 503, "prefill-0"),
        ("p0", SimulatedFault(FaultKind.FORGET, names=("remote_port",)), 502, "prefill-0 left out .* remote_port"),
        ("p0", SimulatedFault(FaultKind.FORGET, names=("do_remote_prefill",)), 502, "prefill-0"),
        ("d0", SimulatedFault(FaultKind.STATUS, status=503), 503, "injected"),
        ("d0", SimulatedFault(FaultKind.STATUS, status=500, body="<html>"), 502, "decode-0"),
    ]
    for name, fault, status, says in cases:
        engines = sims()
        engines[name].inject(fault)
        async with router(engines, Settings(decode_only_fallback=False)) as client:
            response = await client.post(TEXT[0], json=TEXT[1] | {"stream": stream})

        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == (status if status == 502 else fault.status)
        assert re.search(says, error["message"])
        assert ":80" not in response.text


async def test_a_stream_that_fails_at_once_is_a_failed_request():
    """vLLM says 200 and then sends the error as first event: the client gets its status and its words."""
    engines = sims()
    engines["d0"].inject(SimulatedFault(FaultKind.ERROR_EVENT, after=0, status=503))
    async with router(engines) as client:
        response = await client.post(TEXT[0], json=TEXT[1] | {"stream": True})

    assert response.status_code == 503
    assert response.json()["error"]["message"] == "injected"
    assert response.headers["content-type"] == "application/json"


async def test_a_stream_without_its_end_is_not_passed_off_as_complete():
    """The client sees an error event and no [DONE], so that no SDK takes half an answer for all of it."""
    engines = sims()
    engines["d0"].inject(SimulatedFault(FaultKind.END, after=3))
    async with router(engines) as client:
        response = await client.post(TEXT[0], json=TEXT[1] | {"stream": True})

    events = [line for line in response.text.split("\n\n") if line.strip()]
    assert len(events) == 4
    error = json.loads(events[-1].strip().removeprefix("data: "))["error"]
    assert error == {
        "message": "decode-0 ended its stream without [DONE]",
        "type": "EngineError",
        "param": None,
        "code": 502,
    }
    assert "[DONE]\n" not in response.text


async def test_a_request_by_an_alias_has_both_legs_and_the_models_first_name():
    """One model takes the place of another while clients go on saying the old name: docs/cells.md."""
    (path, body) = TEXT
    names = ("new", "old", "chat")
    engines = sims(2, 2, model=names[0], aliases=names[1:])
    async with router(engines) as client:
        answers = [await client.post(path, json=body | {"model": name}) for name in names]
        unknown = await client.post(path, json=body | {"model": "other"})
        listed = (await client.get("/v1/models")).json()["data"]

    for answer in answers:
        assert (answer.status_code, answer.json()["model"]) == (200, "new")
        assert answer.json()["choices"][0]["text"] == expected_text(body)
        assert re.findall(r"(\w+);desc=", answer.headers["server-timing"]) == ["prefill", "decode"]
    assert unknown.status_code == 404
    assert [one["id"] for one in listed] == [*names]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health")]
)
async def test_a_wrong_method_is_told_in_the_shape_clients_know(method, path):
    """With the header that says which would be right."""
    async with router(sims()) as client:
        response = await client.request(method, path)

    assert response.status_code == 405
    assert response.headers["allow"]
    assert response.json()["error"]["type"] == "MethodNotAllowedError"


@pytest.mark.parametrize("path", ["/v1", "/v1/responses/resp_1", "/redoc"])
async def test_what_is_not_there_is_told_in_the_shape_clients_know(path):
    """Also what FastAPI alone would serve, from a CDN."""
    async with router(sims()) as client:
        response = await client.post(path)

    assert response.status_code == 404
    assert response.json()["error"]["code"] == 404


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (Settings(prefill=("nowhere",)), AddressError, "nowhere"),
        (Settings(prefill=("a:1", "http://a:1")), AlreadyKnown, "already|exists|twice|known"),
        (Settings(cache_salt_per_key=True), ConfigError, "cache_salt_per_key needs api_keys_file"),
    ],
)
def test_settings_that_cannot_be_meant_stop_the_router_before_it_starts(settings, error, says):
    """A program that builds its own settings gets the same checks as the command line."""
    with pytest.raises(error, match=says):
        build(settings)


async def test_server_timing_is_left_out_if_the_operator_says_so():
    """It tells a client the milliseconds of a prefill, and how the engines are named."""
    changes = ({}, {"stream": True}, {"n": 2}, {"kv_transfer_params": {"a": 1}})
    async with router(sims(), Settings(server_timing=False)) as client:
        answers = [await client.post(TEXT[0], json=TEXT[1] | more) for more in changes]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert not any("server-timing" in answer.headers for answer in answers)
