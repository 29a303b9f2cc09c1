"""Routes for operators: what they answer is what vLLM's own proxy demo does, with statuses that say what happened."""

import asyncio
import socket
from dataclasses import replace

import httpx
import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

pytestmark = pytest.mark.processes


KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame")
NEW = {"type": "decode", "instance": "d9:80"}


async def add(client, body=NEW, headers=KEY, **options):
    response = await client.post("/instances/add", **({"json": body} | options), headers=headers)
    assert response.headers["content-type"] == "application/json"
    return response.status_code, response.text


def engines_and_new(model="sim"):
    """One engine of each kind, and one that the router does not know yet."""
    return sims() | {"x" + name: sim for name, sim in sims(model=model).items()}


async def test_an_added_engine_serves_from_the_next_request_on():
    """That is what the route is for."""
    engines = engines_and_new()
    async with router(engines, OPEN) as client:
        assert await add(client, {"type": "decode", "instance": "xd0:80"}) == (
            200,
            '{"message":"Added xd0:80 to decode_instances."}',
        )
        assert await add(client, {"type": "prefill", "instance": "xp0:80"}) == (
            200,
            '{"message":"Added xp0:80 to prefill_instances."}',
        )
        seen = [await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}) for _ in range(4)]
        status = await client.get("/status")

    assert {response.status_code for response in seen} == {200}
    assert all(len(engines[name].log) == 2 for name in ("p0", "d0", "xp0", "xd0"))
    assert status.text == (
        '{"prefill_node_count":2,"decode_node_count":2,"prefill_nodes":["p0:80","xp0:80"],"decode_nodes":["d0:80","xd0:80"]}'
    )


async def test_health_needs_one_engine_of_each_kind():
    """Anything less cannot serve a request in two halves."""
    async with router({"xd0": sims()["d0"]} | sims(1, 0), OPEN) as client:
        before = await client.get("/health")
        await add(client, {"type": "decode", "instance": "xd0:80"})
        after = await client.get("/health")

    assert (before.status_code, before.json()["error"]["message"]) == (503, "the router knows no decode instance")
    assert after.status_code == 200


MISSING = '{"detail":"This is for operators: send the router\'s admin key as X-Api-Key."}'
WRONG = '{"detail":"Forbidden: Invalid API Key."}'
NONE = (
    '{"detail":"This router has no admin key, so nobody may do this: start it with --admin-key-file or ADMIN_API_KEY."}'
)


@pytest.mark.parametrize(
    ("settings", "headers", "expected"),
    [
        (OPEN, {}, (401, MISSING)),
        (Settings(), {}, (404, NONE)),
        (Settings(), KEY, (404, NONE)),
        (Settings(admin_key=""), KEY, (404, NONE)),
        (OPEN, {"X-Api-Key": "wrong"}, (401, WRONG)),
        (OPEN, {"X-Api-Key": ""}, (401, WRONG)),
        (OPEN, {"X-Api-Key": b"\xe9"}, (401, WRONG)),
    ],
)
async def test_only_who_has_the_key_may_add(settings, headers, expected):
    """Checked before the body is looked at, in this order."""
    async with router(sims(), settings) as client:
        assert await add(client, headers=headers) == expected
        assert await add(client, headers=headers, json=None, content=b"junk") == expected


async def test_a_key_beyond_ascii_works():
    """Keys come from files that people write."""
    async with router(engines_and_new(), Settings(admin_key="clé")) as client:
        headers = {"X-Api-Key": "clé".encode()}
        assert (await add(client, {"type": "decode", "instance": "xd0:80"}, headers))[0] == 200


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "Invalid instance type."),
        ({"type": "both", "instance": "d9:80"}, "Invalid instance type."),
        ({"type": ["decode"], "instance": "d9:80"}, "Invalid instance type."),
        ({"type": "both", "instance": "nonsense"}, "Invalid instance type."),
        ({"type": "decode"}, "Invalid instance format."),
        ({"type": "decode", "instance": ""}, "Invalid instance format."),
        ({"type": "decode", "instance": "d9"}, "Invalid instance format."),
        ({"type": "decode", "instance": 80}, "Invalid instance format."),
        ({"type": "decode", "instance": "two words:80"}, "Invalid instance address."),
        ({"type": "decode", "instance": "1.2.3.256:80"}, "Invalid instance address."),
        ({"type": "decode", "instance": "d9:eighty"}, "Invalid instance address."),
        ({"type": "decode", "instance": "::1:80"}, "Invalid instance address."),
        ({"type": "decode", "instance": "d9:0"}, "Invalid port number."),
        ({"type": "decode", "instance": "d9:65536"}, "Invalid port number."),
        ({"type": "decode", "instance": "silent:80"}, "Instance validation failed."),
        ({"type": "decode", "instance": "d0:80"}, "Instance already exists."),
        ({"type": "prefill", "instance": "http://P0:80/"}, "Instance already exists."),
    ],
)
async def test_what_cannot_be_added_is_told_in_the_demos_words(body, detail):
    """Scripts compare them."""
    async with router(sims(), OPEN) as client:
        assert await add(client, body) == (400, f'{{"detail":"{detail}"}}')
        status = (await client.get("/status")).json()

    assert (status["prefill_node_count"], status["decode_node_count"]) == (1, 1)


async def test_why_an_engine_is_not_added_is_in_the_log_and_in_a_header(caplog):
    """The demo's words do not say it; who asked need not look for the log of the router that was asked."""
    async with router(sims(), OPEN) as client:
        body = {"type": "decode", "instance": "silent:80"}
        refused = await client.post("/instances/add", json=body, headers=KEY)

    assert "decode silent:80 is not added: candidate cannot be reached" in caplog.text
    assert refused.headers["x-pdrelay-reason"].startswith("candidate cannot be reached")


async def test_a_router_is_not_added_and_is_sent_no_key(tmp_path):
    """Its own address is easily taken for an engine's, for both listen on port 8000 by default.

    It may be anybody's, and wants a key as an engine may.
    """
    (tmp_path / "keys").write_text("a:sk-of-another-router\n")
    own = replace(OPEN, prefill_api_key="engine-key", decode_api_key="engine-key")
    shown = []
    async with router(sims(), Settings(api_keys_file=str(tmp_path / "keys"))) as another:

        async def router_there(request):
            shown.append(request.headers.get("authorization"))
            answer = await another.request(request.method, request.url.path, content=request.content)
            return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(answer.content))

        async with router(sims() | {"r0": router_there, "q0": router_there}, own) as client:
            for name, role in (("r0", "prefill"), ("q0", "decode")):
                new = {"type": role, "instance": f"{name}:80"}
                response = await client.post("/instances/add", json=new, headers=KEY)
                said = response.headers["x-pdrelay-reason"]
                assert (response.status_code, response.json()) == (400, {"detail": "Instance validation failed."})
                assert said.startswith("candidate is a router, not an engine: ")
            status = (await client.get("/status")).json()

    assert (status["prefill_node_count"], status["decode_node_count"]) == (1, 1)
    assert set(shown) == {None}


async def test_a_name_that_leads_nowhere_is_in_the_log_too(caplog, monkeypatch):
    """Nothing has been sent by then."""

    async def nowhere(_host, _port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("pdrelay_proxy.building.engines.resolved", nowhere)
    app = build(Settings(admin_key="sesame", allowed_instances=("*.example",))).app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        refused = await add(client, {"type": "decode", "instance": "d9.example:80"})

    assert refused == (400, '{"detail":"Instance validation failed."}')
    assert "decode d9.example:80 is not added: [Errno -2] Name or service not known" in caplog.text


async def test_a_body_must_be_json_whatever_it_is_called():
    """As the demo has it: curl -d sends it as a form."""
    async with router(engines_and_new(), OPEN) as client:
        for junk in (b"junk", b"[]", b""):
            assert await add(client, json=None, content=junk) == (400, '{"detail":"The body is not a JSON object."}')
        body = b'{"type": "decode", "instance": "xd0:80"}'
        form = KEY | {"content-type": "application/x-www-form-urlencoded"}
        assert (await add(client, headers=form, json=None, content=body))[0] == 200


async def test_an_engine_of_a_second_model_can_be_added():
    """It gets the requests for its model, and no other, from the first one on."""
    engines = sims(model="one") | {"x" + name: sim for name, sim in sims(model="two").items()}
    async with router(engines, OPEN) as client:
        while None in [row["models"] for row in (await client.get("/instances", headers=KEY)).json()["instances"]]:
            await asyncio.sleep(0.01)  # until those of the settings have been asked
        for role, name in (("decode", "xd0"), ("prefill", "xp0")):
            assert (await add(client, {"type": role, "instance": f"{name}:80"}))[0] == 200
        for _ in range(4):
            answer = await client.post("/v1/completions", json={"model": "two", "prompt": "a", "max_tokens": 2})
            assert answer.status_code == 200

    assert [len(engines[name].log) for name in ("p0", "d0", "xp0", "xd0")] == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("instance", "known"),
    [("xd0:80", "xd0:80"), ("http://xd0:80", "xd0:80"), ("XD0:80", "xd0:80"), ("[::1]:80", "[::1]:80")],
)
async def test_names_and_ipv6_are_accepted(instance, known):
    """The demo takes only IPv4 addresses; clusters have names, and IPv6 stands in the brackets that URLs use."""
    async with router(engines_and_new() | {"::1": sims()["d0"]}, OPEN) as client:
        assert (await add(client, {"type": "decode", "instance": instance}))[0] == 200
        assert (await client.get("/status")).json()["decode_nodes"] == ["d0:80", known]


async def test_the_wrong_method_is_told_in_the_demos_format():
    """FastAPI's own."""
    async with router(sims(), OPEN) as client:
        response = await client.get("/instances/add")

    assert (response.status_code, response.text) == (405, '{"detail":"Method Not Allowed"}')
