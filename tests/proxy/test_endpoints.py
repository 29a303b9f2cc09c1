"""Every path that clients can reach, in front of engines that check the rules of both legs; and those they cannot."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from pdrelay_tools.simulated.rules import expected_text, token_ids
from support.sim import router, sims

BODIES = {
    Api.COMPLETIONS: {"prompt": "once upon a time", "max_tokens": 5},
    Api.CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    Api.RESPONSES: {"input": "once upon a time", "max_output_tokens": 5},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "model": "sim"},
    Api.GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "temperature": 0.0}},
}
ALONE = sorted(path for path, kind in ENDPOINTS.items() if kind is EndpointKind.JSON)
# Of vLLM 0.32: they load code, change weights, stop or read the engine, or pass on to any of the others.
OF_THE_ENGINE = [
    *("/invocations", "/ping", "/load", "/version", "/kv_event_sources", "/tokenizer_info", "/server_info"),
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/collective_rpc", "/scale_elastic_ep"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory", "/start_profile"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/init_weight_transfer_engine"),
    *("/abort_requests", "/inference/v1/abort_requests", "/fault_tolerance/apply"),
    *("/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/completions/../sleep", "/v1//sleep"),
]


def text_of(api, response):
    body = response.json()
    match api:
        case Api.RESPONSES:
            return body["output"][0]["content"][0]["text"]
        case Api.MESSAGES:
            return body["content"][0]["text"]
        case Api.CHAT:
            return body["choices"][0]["message"]["content"]
        case Api.GENERATE:
            return body["choices"][0]["token_ids"]
    return body["choices"][0]["text"]


def streamed_text(api, response):
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ") and "[DONE]" not in line]
    events = [json.loads(line) for line in lines]
    match api:
        case Api.RESPONSES:
            assert events[-1]["type"] == "response.completed"
            return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        case Api.MESSAGES:
            assert events[-1]["type"] == "message_stop"
            return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        case Api.CHAT:
            return "".join(event["choices"][0]["delta"]["content"] for event in events)
        case Api.GENERATE:
            return [token for event in events for token in event["choices"][0]["token_ids"]]
    return "".join(event["choices"][0]["text"] for event in events)


def violations(engines):
    return [violation for sim in engines.values() for violation in sim.violations]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("api", Api)
async def test_every_api_that_generates_has_two_legs(api, mode):
    """Two engines give the text of one, streamed or not, whoever moves the KV cache."""
    engines = sims(mode=mode)
    body = BODIES[api] | {"model": "sim"}  # engines have not said yet what they serve
    async with router(engines) as client:
        wholes = [await client.post(api, json=body) for _ in range(2)]
        streams = [await client.post(api, json=body | {"stream": True}) for _ in range(2)]

    expected = token_ids([5, 6, 7], 5) if api is Api.GENERATE else expected_text(BODIES[api])
    assert [text_of(api, response) for response in wholes] == [expected] * 2
    assert [streamed_text(api, response) for response in streams] == [expected] * 2
    assert [len(sim.log) for sim in engines.values()] == [4, 4]
    assert not violations(engines)


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES])
async def test_a_stream_that_fails_before_its_first_word_is_retried(api):
    """/v1/responses announces itself before the engine has done anything: that is not yet an answer."""
    engines = sims(1, 2)
    after = 2 if api is Api.RESPONSES else 0
    engines["d0"].inject(SimulatedFault(FaultKind.ERROR_EVENT, after=after, status=500, times=1))
    async with router(engines) as client:
        responses = [await client.post(api, json=BODIES[api] | {"stream": True}) for _ in range(2)]

    assert [streamed_text(api, response) for response in responses] == [expected_text(BODIES[api])] * 2
    assert sum("retry;" in response.headers["server-timing"] for response in responses) == 1


@pytest.mark.parametrize("path", ALONE)
async def test_what_has_one_leg_goes_to_one_decode_engine_as_it_came(path):
    """And no prefill engine is bothered."""
    raw = b'{"model":"sim", "input" : ["a", 1.50],"x":1e400}'
    engines = sims(1, 2)
    async with router(engines, Settings(health_check_interval_s=0.0)) as client:
        responses = [
            await client.post(path, content=raw, headers={"content-type": "application/json"}) for _ in range(2)
        ]

    assert [response.status_code for response in responses] == [200, 200]
    single = 'mode;desc="single", reason;desc="one_leg", decode;desc="decode-0"'
    assert responses[0].headers["server-timing"].startswith(single)
    assert responses[0].headers["x-request-id"].startswith("pdrelay-")
    assert [[entry.body for entry in sim.log] for sim in engines.values()] == [[], [raw.decode()], [raw.decode()]]


@pytest.mark.parametrize("path", [path for path, kind in ENDPOINTS.items() if kind is EndpointKind.FORM])
async def test_a_form_is_passed_through(path):
    """Audio is bytes that nobody here understands."""
    engines = sims()
    async with router(engines) as client:
        response = await client.post(path, files={"file": ("a.wav", bytes(range(256)))}, data={"model": "sim"})
        wrong = await client.post(path, json={})

    assert response.status_code == 200
    entry = engines["d0"].log[0]
    assert entry.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert response.json()["bytes"] == int(entry.headers["content-length"])
    assert wrong.status_code == 415


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_engines_own_paths_do_not_exist(method):
    """Whoever reaches them can stop an engine, or change what it says."""
    engines = sims()
    async with router(engines) as client:
        for path in OF_THE_ENGINE:
            response = await client.request(method, path, json={})
            assert response.status_code == 404, path
            assert response.json()["error"]["code"] == 404, path

    assert not any(sim.log for sim in engines.values())


async def test_without_prefill_engines_one_engine_serves_alone():
    """Slower, and it says so; an operator may prefer a refusal."""
    body = BODIES[Api.COMPLETIONS]
    async with router(sims(0, 1)) as client:
        alone = await client.post(Api.COMPLETIONS, json=body)
    async with router(sims(0, 1), Settings(decode_only_fallback=False)) as client:
        refused = await client.post(Api.COMPLETIONS, json=body)

    assert text_of(Api.COMPLETIONS, alone) == expected_text(body)
    assert 'mode;desc="single", reason;desc="no_prefill_engine"' in alone.headers["server-timing"]
    assert refused.status_code == 503
