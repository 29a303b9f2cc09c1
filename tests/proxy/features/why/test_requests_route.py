"""``GET /requests/NAME``: what happened to a request, over the router and its engines."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

import httpx
import pytest

from pdrelay_proxy.features.why.settings import WhySettings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import router, sims, until_async
from support.simulated_loop import in_simulated_time

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0)
PROMPT = {"prompt": "hello", "max_tokens": 3}


def now():
    """Seconds since the epoch."""
    return datetime.now(UTC).timestamp()


async def ask(client, name):
    response = await client.get(f"/requests/{name}", headers=KEY)
    return response.status_code, response.json()


async def test_a_request_is_found_by_the_id_that_its_client_got():
    """Its rows add up to its duration."""
    async with router(sims(), OPEN) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        status, found = await ask(client, response.headers["x-request-id"])

    (request,) = found["requests"]
    assert (status, request["status"], request["outcome"], request["state"]) == (200, 200, "ok", "over")
    assert (request["mode"], request["path"], request["client_id"]) == ("pull", "/v1/completions", None)
    assert abs(now() - request["began_at"]) < 60
    whats = [row["what"] for row in request["rows"]]
    assert [what for what in whats if what.endswith("leg")] == ["prefill leg", "decode leg"]
    assert sum(row["duration_ms"] for row in request["rows"]) == pytest.approx(request["duration_ms"], abs=0.1)
    assert {note.partition(":")[0] for note in request["notes"]} == {"prefill-0", "decode-0"}  # no timelines there


async def test_the_beginning_of_an_id_is_enough_where_it_is_one_requests():
    """The status page shows 13 characters of an id, and dots; people read one to each other by its first digits."""
    async with router(sims(), OPEN) as client:
        first, _ = [(await client.post("/v1/completions", json=PROMPT)).headers["x-request-id"] for _ in range(2)]
        shown = [await ask(client, beginning) for beginning in (first[:-1], f"{first[:25]}...")]
        await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "chat-17"})
        by_client = await ask(client, "chat-1")
        ambiguous = await ask(client, "pdrelay-")
        unknown = await ask(client, "zpyd-")

    assert [(status, [each["request_id"] for each in found["requests"]]) for status, found in shown] == [
        (200, [first])
    ] * 2
    assert (by_client[0], by_client[1]["requests"][0]["client_id"]) == (200, "chat-17")
    assert ambiguous == (400, {"detail": "3 requests have an id that begins with 'pdrelay-': write more of it"})
    assert unknown[0] == 404


async def test_what_engines_noted_is_asked_for_under_their_name_of_the_request():
    """And is put into their leg."""
    engines = sims()
    async with router(engines, OPEN) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        name = response.headers["x-request-id"]
        at = now()
        steps = [("arrived", 0.0, 0), ("queued", 0.001, 0), ("finished", 0.002, 1)]
        events = [{"step": step, "at": at + after, "count": number} for step, after, number in steps]
        engines["p0"].timelines, engines["d0"].timelines = {name: events}, {}
        _, found = await ask(client, name)

    (request,) = found["requests"]
    whats = [row["what"] for row in request["rows"] if row["leg"] == "prefill-0"]
    assert [what for what in whats if what in ("API server", "finish")] == ["API server", "finish"]
    assert [note for note in request["notes"] if "clock" not in note] == [
        "decode-0: it knows nothing of the request, or no more"
    ]


@pytest.mark.parametrize(("at", "count"), [(1e308, 1), (-1e308, 1), (0.0, 1 << 99)])
async def test_an_engine_that_notes_nonsense_hides_nothing_of_the_router(at, count):
    """A time or a number without bounds is one that the answer cannot hold."""
    engines = sims()
    async with router(engines, OPEN) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        name = response.headers["x-request-id"]
        events = [{"step": step, "at": at, "count": count} for step in ("arrived", "considered", "finished")]
        engines["p0"].timelines, engines["d0"].timelines = {name: events}, {}
        status, found = await ask(client, name)

    (request,) = found["requests"]
    assert status == 200
    assert "prefill-0: it answers something else than a timeline" in request["notes"]
    assert [row["what"] for row in request["rows"]].count("prefill leg") == 1


async def test_a_request_under_way_is_shown_as_far_as_it_has_come():
    """When one hangs, this says where; it is found by what its client calls it."""
    engines = sims()
    async with router(engines, OPEN) as client:
        engines["p0"].inject(SimulatedFault(FaultKind.STALL))
        asked = asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine"}))
        await until_async(lambda: engines["p0"].log)
        _, found = await ask(client, "mine?engines=false")
        asked.cancel()

    (request,) = found["requests"]
    assert (request["state"], request["status"], request["client_id"]) == ("prefilling", None, "mine")
    assert request["rows"][-1]["what"] == "prefill leg"


async def test_only_the_latest_requests_are_kept():
    """The router forgets the others."""
    settings = Settings(admin_key="sesame", health_check_interval_s=0.0).with_features(WhySettings(request_history=0))
    async with router(sims(), settings) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        status, found = await ask(client, response.headers["x-request-id"])

    assert status == 404
    assert "last 0 that are over" in found["detail"]


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"X-Api-Key": "wrong"}, 401)])
async def test_only_operators_may_ask(headers, status):
    """A timeline names engines and clients' ids."""
    async with router(sims(), OPEN) as client:
        assert (await client.get("/requests/pdrelay-0", headers=headers)).status_code == status


async def test_operators_need_no_key_of_a_client(tmp_path):
    """Where clients do need one."""
    keys = tmp_path / "keys.txt"
    keys.write_text("alice:secret-of-alice-1\n")
    async with router(sims(), replace(OPEN, api_keys_file=str(keys))) as client:
        response = await client.post(
            "/v1/completions", json=PROMPT, headers={"authorization": "Bearer secret-of-alice-1"}
        )
        status, _ = await ask(client, response.headers["x-request-id"])

    assert (response.status_code, status) == (200, 200)


@pytest.mark.parametrize("name", ["jobs/17", "a//b/", "50%?x#y"])
async def test_a_name_may_have_any_letters_that_a_header_may(name):
    """A client's id may be a path; the command escapes it."""
    async with router(sims(), OPEN) as client:
        await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": name})
        status, found = await ask(client, quote(name, safe=""))
        unknown = await ask(client, "nobody%2F")

    assert unknown[0] == 404
    assert (status, [request["client_id"] for request in found["requests"]]) == (200, [name])


def test_requests_of_one_name_are_asked_for_together():
    """A client that tries again names both alike. An engine that hangs may take all the time that a command waits."""
    engines = sims()
    sim = engines["p0"]
    both = asyncio.Barrier(2)

    async def slow(request):
        if "/v1/pdrelay/requests/" in str(request.url):
            await both.wait()
        return await httpx.ASGITransport(sim).handle_async_request(request)

    async def scene():
        known = replace(OPEN, health_check_timeout_s=1.0)
        async with router(engines | {"p0": slow}, known, clock=asyncio.get_running_loop().time) as client:
            for _ in range(2):
                await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "chat-17"})
            return await ask(client, "chat-17")

    _, (status, found) = in_simulated_time(scene())

    assert (status, len(found["requests"])) == (200, 2)
    assert [request["notes"][0].partition(", ")[0] for request in found["requests"]] == [
        "prefill-0: it keeps no timelines: add pdrelay_timelines to its VLLM_PLUGINS (docs/why.md)"
    ] * 2


@pytest.mark.parametrize("answer", [b"[]", b'{"requests": 1}', b'{"requests": [{"events": [{"step": 1}]}]}', b"{"])
async def test_an_engine_that_answers_nonsense_is_named(answer):
    """The router's own rows are shown all the same."""
    engines = sims()
    sim = engines["p0"]

    async def odd(request):
        if "/v1/pdrelay/requests/" in str(request.url):
            return httpx.Response(200, content=answer)
        return await httpx.ASGITransport(sim).handle_async_request(request)

    async with router(engines | {"p0": odd}, OPEN) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        status, found = await ask(client, response.headers["x-request-id"])

    assert status == 200
    assert "prefill-0: it answers something else than a timeline" in found["requests"][0]["notes"]
