"""Who may come in."""

import asyncio
import json

import pytest

from pdrelay_proxy.api.auth import AuthMiddleware, is_open
from pdrelay_proxy.core.admission.keys import Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime, Step
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

pytestmark = pytest.mark.edges


PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 5}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("team-a:sk-a-of-16-chars\nteam-b:sk-b-of-16-chars\n")
    return str(path)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def test_a_client_without_a_good_key_gets_a_401_in_openais_shape(keys):
    """And no engine hears of it; the answer has an id like any other."""
    engines = sims()
    async with router(engines, Settings(api_keys_file=keys)) as client:
        answers = [
            await client.post(PATH, json=BODY),
            await client.post(PATH, json=BODY, headers=bearer("sk-c-of-16-chars")),
            await client.post(PATH, json=BODY, headers={"authorization": "Basic sk-a-of-16-chars"}),
            await client.get("/v1/models", headers=bearer("")),
            await client.post("/tokenize", json=BODY),
            await client.get("/no/such/path"),
        ]

    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert answer.json()["error"]["type"] == "AuthenticationError"
        assert "sk-" not in answer.text
    assert "x-request-id" in answers[0].headers
    assert not any(entry.path.startswith("/v1/c") for sim in engines.values() for entry in sim.log)


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/tokenize", "/v1/models", "/metrics", "/stats"])
async def test_one_good_key_of_two_is_enough(path, keys):
    """Coding agents send Authorization and X-Api-Key if variables for both are set, and one of them may be old."""
    body = BODY if path != "/v1/messages" else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    method = "GET" if path in ("/v1/models", "/metrics", "/stats") else "POST"
    async with router(sims(), Settings(api_keys_file=keys)) as client:
        statuses = []
        for key, other in (
            ("old", "sk-a-of-16-chars"),
            ("sk-a-of-16-chars", "old"),
            ("", "sk-a-of-16-chars"),
            ("sk-a-of-16-chars", "sk-b-of-16-chars"),
            ("old", "old"),
            ("", ""),
        ):
            headers = bearer(key) | {"x-api-key": other}
            answer = await client.request(method, path, json=body if method == "POST" else None, headers=headers)
            statuses.append(answer.status_code)

    assert statuses == [200, 200, 200, 200, 401, 401]


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(path, keys):
    """Kubernetes has none."""
    async with router(sims(), Settings(api_keys_file=keys)) as client:
        assert (await client.get(path)).status_code == 200


async def test_addresses_are_shown_to_who_has_a_key(keys):
    """`/status` is the demo's format and names them: a client's key opens it, or the operator's."""
    async with router(sims(), Settings(api_keys_file=keys, admin_key="sesame")) as client:
        shown = [
            (await client.get("/status", headers=headers)).status_code
            for headers in (
                {},
                bearer("sk-c-of-16-chars"),
                bearer("sk-a-of-16-chars"),
                {"x-api-key": "sesame"},
                {"x-api-key": "sesam"},
            )
        ]
    async with router(sims(), Settings(api_keys_file=keys)) as client:
        without = (await client.get("/status", headers={"x-api-key": ""})).status_code

    assert shown == [401, 401, 200, 200, 401]
    assert without == 401


def test_everything_else_needs_one():
    """Also what is added tomorrow."""
    assert not any(
        map(is_open, ["/v1/completions", "/tokenize", "/v2/rerank", "/instancesx", "/pairsx", "//", "/health/", ""])
    )
    assert all(map(is_open, ["/instances", "/instances/add", "/pairs", "/stats"]))


async def test_a_key_over_its_limit_gets_429_and_the_others_notice_nothing(keys):
    """With the seconds after which another try makes sense."""
    settings = Settings(api_keys_file=keys, max_key_rate=0.001)  # on a slow machine, too, the second comes too early
    async with router(sims(), settings) as client:
        answers = [
            await client.post(PATH, json=BODY, headers=bearer(key))
            for key in ("sk-a-of-16-chars", "sk-a-of-16-chars", "sk-b-of-16-chars")
        ]

    assert [answer.status_code for answer in answers] == [200, 429, 200]
    assert 900 < int(answers[1].headers["retry-after"]) <= 1000
    error = answers[1].json()["error"]
    assert error["type"] == "RateLimitError"
    assert error["message"] == "the key team-a sends more than 0.001 requests a second (max_key_rate)"


@pytest.mark.parametrize(("key", "seen"), [("sk-a-of-16-chars", "0"), ("sk-b-of-16-chars", "-10")])
@pytest.mark.parametrize("path", [PATH, "/v1/embeddings", "/v1/messages"])
async def test_a_client_is_no_more_important_than_its_key_says(tmp_path, key, seen, path):
    """Here, and for both engines; whether its header asks for it or its body."""
    file = tmp_path / "keys"
    file.write_text("team-a:sk-a-of-16-chars\nteam-b:sk-b-of-16-chars priority=-10\n")
    engines = sims()
    message = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user"}]}
    body = {PATH: BODY, "/v1/embeddings": {"input": "a"}}.get(path, message)
    async with router(engines, Settings(api_keys_file=str(file))) as client:
        by_header = await client.post(path, json=body, headers=bearer(key) | {"x-vllm-priority": "-999999999"})
        by_body = await client.post(path, json=body | {"priority": -999999999}, headers=bearer(key))
        by_text = await client.post(path, json=body | {"priority": "-999999999"}, headers=bearer(key))
        odd = await client.post(path, json=body | {"priority": "most"}, headers=bearer(key))

    assert [answer.status_code for answer in (by_header, by_body, by_text, odd)] == [200, 200, 200, 400]
    logs = [sim.log for sim in engines.values() if sim.log]
    assert [entry.headers["x-vllm-priority"] for entry in (log[0] for log in logs)] == [seen] * len(logs)
    assert [str(json.loads(log[1].body)["priority"]) for log in logs] == [seen] * len(logs)
    assert [str(json.loads(log[2].body)["priority"]) for log in logs] == [seen] * len(logs)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_sees_the_key_of_its_pool_and_never_a_clients(role):
    """A client's key is for this router: an engine, or who reads its log, could use it here."""
    engines = sims()
    settings = Settings(**{f"{role}_api_key": "engine-key"})
    async with router(engines, settings) as client:
        await client.post(PATH, json=BODY, headers=bearer("client-key"))
        await client.get("/v1/models", headers=bearer("client-key"))

    for sim in engines.values():
        shown = {entry.headers.get("authorization") for entry in sim.log if entry.path == PATH}
        assert shown == {"Bearer engine-key" if sim.role == role else None}


async def test_an_answer_that_has_ended_is_not_cut_off():
    """The request is only tidying up: what is said after the end is a mistake, and the server would log it as one."""
    lifetime = Lifetime()
    sent = []
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        ended.set()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    door = AuthMiddleware(app, lifetime=lifetime, keyring=Keyring(None), sites=Sites(Settings()))
    scope = {"type": "http", "method": "GET", "path": PATH, "headers": []}
    serving = asyncio.create_task(door(scope, None, send))
    await ended.wait()
    for step in (Step.SHUTDOWN, Step.GRACE_OVER):
        lifetime.on(step)
    serving.cancel()
    await asyncio.wait((serving,))

    assert [message.get("more_body") for message in sent] == [None, True, False]
