"""Routes for operators: who is there, who leaves, what would become of a request."""

import asyncio
import json

import pytest

from pdrelay_proxy.api.instances import InstanceAdmin
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.clock import Clock
from support.sim import router, sims
from support.steps import work_of_steps

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0)
PROMPT = {"model": "sim", "prompt": "hello", "max_tokens": 5, "temperature": 1.0e0}


async def call(client, verb, body, *, headers=KEY):
    response = await client.post(f"/instances/{verb}", json=body, headers=headers)
    return response.status_code, response.json()


async def rows(client):
    found = (await client.get("/instances", headers=KEY)).json()["instances"]
    return {row["id"]: row for row in found}


async def known(client):
    """Wait until every engine has been probed."""
    async with asyncio.timeout(30):
        while True:
            found = await rows(client)
            if all(row["version"] for row in found.values()):
                return found
            await asyncio.sleep(0.01)


async def complete(client, **body):
    return await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | body)


async def test_the_list_says_what_is_known_of_each():
    """After probes and a request."""
    async with router(sims(), Settings(admin_key="sesame")) as client:
        await complete(client)
        while (found := await known(client))["prefill-0"]["mode"] is None:  # it is told a moment later
            await asyncio.sleep(0.005)

    prefill, decode = found["prefill-0"], found["decode-0"]
    assert {name: prefill[name] for name in ("role", "address", "rank", "state", "mode", "in_flight")} == {
        "role": "prefill",
        "address": "p0:80",
        "rank": None,
        "state": "healthy",
        "mode": "pull",
        "in_flight": 0,
    }
    assert (decode["models"], decode["version"], decode["mode"]) == (["sim"], "0.32.0", None)
    assert 0 <= decode["since_s"] < 60


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"id": "decode-9"}, 404, "there is no instance 'decode-9'"),
        ({"type": "decode", "instance": "elsewhere:80"}, 404, "there is no decode instance at elsewhere:80"),
        ({"type": "decode", "instance": "nonsense"}, 400, "is not the address of an engine"),
        ({}, 404, "name an instance"),
        ({"id": 7}, 400, "not what this route takes"),
        ({"ids": ["decode-0"]}, 400, "not what this route takes"),
        ([], 400, "not what this route takes"),
    ],
)
async def test_what_cannot_be_done_is_said_in_a_sentence(body, status, said):
    """And nothing is done."""
    async with router(sims(), OPEN) as client:
        found = await call(client, "drain", body)
        states = {row["state"] for row in (await rows(client)).values()}

    assert found[0] == status
    assert said in found[1]["detail"]
    assert "draining" not in states


async def explain(client, body=PROMPT, *, path="/v1/completions", **headers):
    return await call(client, "explain", {"path": path, "body": body, "headers": headers})


async def test_explain_says_what_each_engine_would_get():
    """The bodies are those that the relay would send."""
    engines = sims()
    async with router(engines, OPEN) as client:
        raw = b'{"path": "/v1/completions", "body": {"prompt":"hello","max_tokens":5,"temperature":1.0e0}}'
        headers = KEY | {"content-type": "application/json"}
        found = (await client.post("/instances/explain", content=raw, headers=headers)).content
        asked = b'{"prompt":"hello","max_tokens":5,"temperature":1.0e0}'
        await client.post("/v1/completions", content=asked, headers={"content-type": "application/json"})

    said = json.loads(found)
    assert (said["rule"], said["prefill"], said["decode"]) == ("prefill first, then decode", "prefill-0", "decode-0")
    assert b'"temperature":1.0e0' in found
    sent = json.loads(engines["p0"].log[0].body)
    sent["kv_transfer_params"]["transfer_id"] = said["prefill_body"]["kv_transfer_params"]["transfer_id"]
    assert said["prefill_body"] == sent
    sent = json.loads(engines["d0"].log[0].body)
    assert sent["prompt"] != "hello"
    shown = {"kv_transfer_params": "those that", "prompt": "the token ids that", "model": "the one that"}
    assert said["decode_body"] == sent | {name: f"{words} prefill-0 answers with" for name, words in shown.items()}


async def test_explain_of_a_pushing_engine_shows_both_legs():
    """Once it is known where it is."""
    async with router(sims(mode="push"), OPEN) as client:
        await complete(client)
        _, said = await explain(client)

    assert said["rule"] == "both legs at once (push)"
    assert said["decode_body"]["kv_transfer_params"]["do_remote_prefill"] is True


async def test_explain_names_the_rule_of_a_request_that_is_not_split():
    """The same words as in Server-Timing."""
    async with router(sims(), OPEN) as client:
        _, several = await explain(client, PROMPT | {"n": 2})
        await call(client, "drain", {"id": "prefill-0"})
        _, without = await explain(client)

    assert (several["rule"], several["prefill"], several["prefill_body"]) == ("single: n", None, None)
    assert without["rule"] == "single: no_prefill_engine"


async def test_engines_that_cannot_share_a_request_are_named():
    """That there is a prefill engine, and why it is of no use, is another thing to mend than that there is none."""
    async with router(sims(), OPEN) as client:
        for role, name in (("prefill", "p0"), ("decode", "d0")):
            await call(client, "remove", {"id": f"{role}-0"})
            await call(client, "add", {"type": role, "instance": f"{name}:80#revision={name}"})
        _, said = await explain(client)
        answer = await complete(client)

    why = "no prefill instance fits a decode instance: decode-1 with prefill-1: the revision is p0 there and d0 here"
    assert said["rule"] == f"single: no_matching_prefill_engine ({why})"
    assert answer.status_code == 200
    assert 'reason;desc="no_matching_prefill_engine"' in answer.headers["server-timing"]


@pytest.mark.parametrize("policy", [*PolicyName, *feature_policies()])
async def test_explaining_changes_nothing(policy):
    """Ten times the same answer, and then the request goes there."""
    engines = sims(3, 3)
    settings = Settings(admin_key="sesame", health_check_interval_s=0.0, prefill_policy=policy, decode_policy=policy)
    async with router(engines, settings) as client:
        headers = {"x-session-id": "s"}
        await client.post("/v1/completions", json=PROMPT, headers=headers)
        said = [(await explain(client, **headers))[1] for _ in range(10)]
        assert [engine.log for engine in engines.values() if len(engine.log) > 1] == []
        answer = await client.post("/v1/completions", json=PROMPT, headers=headers)

    pairs = {(one["prefill"], one["decode"]) for one in said}
    if policy not in (PolicyName.POWER_OF_TWO, *feature_policies()):  # chance picks one of equals
        assert len(pairs) == 1
        prefill, decode = pairs.pop()
        assert f'prefill;desc="{prefill}"' in answer.headers["server-timing"]
        assert f'decode;desc="{decode}"' in answer.headers["server-timing"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"path": "/health", "body": {}}, "has no two legs to explain"),
        ({"path": "/v1/completions", "body": []}, "not an object"),
        ({"path": "/v1/completions", "body": {"kv_transfer_params": {}}}, "kv_transfer_params is set by the router"),
        ({"path": "/v1/completions", "body": PROMPT, "headers": {"X-data-parallel-rank": "x"}}, "whole number"),
        ({"body": {}}, "not what this route takes"),
    ],
)
async def test_what_would_be_refused_is_said(question, said):
    """With the words that the client would get."""
    async with router(sims(), OPEN) as client:
        status, found = await call(client, "explain", question)

    assert status == 400
    assert said in json.dumps(found)


async def test_a_rank_is_a_target_of_its_own():
    """Each leg names the rank that was chosen; a client may name that of the engine that answers."""
    engines = {"xd0": sims()["d0"]} | sims(1, 0)
    async with router(engines, OPEN) as client:
        added = await client.post("/instances/add", headers=KEY, json={"type": "decode", "instance": "xd0:80#dp=2"})
        assert added.json() == {"message": "Added xd0:80#dp=2 to decode_instances."}
        for _ in range(2):
            await complete(client)
        await client.post("/v1/completions", json=PROMPT, headers={"X-data-parallel-rank": "1"})
        wrong = await client.post("/v1/completions", json=PROMPT, headers={"X-data-parallel-rank": "2"})

    ranks = [entry.headers.get("x-data-parallel-rank") for entry in engines["xd0"].log]
    assert ranks == ["0", "1", "1"]
    assert "x-data-parallel-rank" not in engines["p0"].log[-1].headers
    assert (wrong.status_code, "no decode instance has this rank" in wrong.text) == (400, True)


async def test_when_no_engine_can_serve_clients_are_told_at_once_and_later_served():
    """Instead of trying a dead engine three times for everybody."""
    engines = sims()
    clock = Clock()
    settings = Settings(
        health_check_interval_s=0.0, circuit_breaker_failures=3, ejection_time_s=5.0, decode_only_fallback=False
    )
    async with router(engines, settings, clock) as client:
        gone = engines.pop("p0")
        failed = [await complete(client) for _ in range(3)]
        engines["p0"] = gone
        clock.now += 5.0
        healed = [await complete(client) for _ in range(2)]

    assert [answer.status_code for answer in failed] == [502, 503, 503]
    assert (failed[-1].status_code, failed[-1].headers["retry-after"]) == (503, "5")
    assert failed[-1].json()["error"]["message"] == "no prefill instance can take a request: prefill-0 is ejected"
    assert [answer.status_code for answer in healed] == [200, 200]


async def test_retries_of_all_requests_together_are_bounded():
    """All engines fail: 60 requests with two retries each would else be 180."""
    engines = sims(1, 3)
    settings = Settings(health_check_interval_s=0.0, circuit_breaker_failures=0)
    async with router(engines, settings, lambda: 1.0) as client:  # time brings more retries
        for name in ("d0", "d1", "d2"):
            engines[name].inject(SimulatedFault(FaultKind.STATUS, status=500))
        for _ in range(60):
            assert (await complete(client)).status_code == 500

    legs = sum(len(engines[name].log) for name in ("d0", "d1", "d2"))
    assert 60 + 20 <= legs <= 60 + 20 + 12


@pytest.mark.parametrize("count", [0, 1, 50, 51, 10_000])
def test_the_list_is_written_in_steps_of_some_engines(count):
    """Ten thousand engines in one piece held the event loop for a quarter of a second. It is the same JSON."""
    registry = Registry()
    for number in range(count):
        registry.add(Role.DECODE, Address("http", f"h{number}", 80))
    admin = InstanceAdmin(registry, explainer=None, clock=lambda: 1.0, changes=None, own=None)
    work = work_of_steps(admin.pieces())
    text = b"".join(admin.pieces())

    assert text.decode() == admin.rows(registry.members()).model_dump_json()
    assert max(work) <= 2_000
    assert len(json.loads(text)["instances"]) == count
