"""The way into routes for operators: the key, the size of the body, and a sentence about what is wrong with it."""

import json
import logging
import re
from dataclasses import replace

import pytest

from pdrelay_proxy.api.operator_bodies import SMALL_BODY
from pdrelay_proxy.api.operator_route import OPERATORS
from pdrelay_proxy.app import build
from pdrelay_proxy.core.admission.admin_key import fingerprint
from pdrelay_proxy.settings import Settings
from support.sim import router, sims, until_async

KEY = {"X-Api-Key": "sesame", "content-type": "application/json"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0)
PATHS = (
    "/instances/add",
    "/instances/remove",
    "/instances/drain",
    "/instances/undrain",
    "/instances/turn",
    "/instances/explain",
)


@pytest.mark.parametrize("path", PATHS)
async def test_of_a_caller_without_the_key_nothing_is_read(path):
    """A body of any size may follow."""
    sent = []

    async def receive():
        raise AssertionError("the body was asked for")

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9999999999")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await build(OPEN).app(scope | {"server": ("localhost", 80), "client": ("::1", 1)}, receive, send)

    assert sent[0]["status"] == 401


async def opened_by(client, key):
    """Return the answers of what wants an operator's key, and of what takes it; and the lines of the document."""
    headers = {"X-Api-Key": key}
    statuses = [(await client.get(path, headers=headers)).status_code for path in ("/instances", "/status", "/metrics")]
    document = await client.get("/openapi.json", headers=headers)
    return [*statuses, document.status_code, "/instances" in document.text]


CLOSED, OPENED = [401, 401, 401, 401, False], [200, 200, 200, 200, True]


@pytest.fixture
def key_files(tmp_path):
    (tmp_path / "keys").write_text("me:sk-1-of-16-chars\n")
    (tmp_path / "admin").write_text("sesame-1")
    return tmp_path


def settings_of(folder, admin="admin"):
    return Settings(api_keys_file=str(folder / "keys"), admin_key_file=str(folder / admin), allowed_hosts=("*",))


async def test_a_key_that_was_rotated_opens_nothing_and_the_new_one_everything(key_files, monkeypatch, caplog):
    """Seconds after its file has changed; the audit log shows who acts by the new one."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("pdrelay_proxy.io.reloads._EVERY_S", 0.01)
    async with router(sims(), settings_of(key_files)) as client:
        before = [await opened_by(client, key) for key in ("sesame-1", "sesame-22")]
        (key_files / "admin").write_text("sesame-22")
        await until_async(lambda: "admin_key_file changed and was read again" in caplog.text, seconds=30)
        after = [await opened_by(client, key) for key in ("sesame-1", "sesame-22")]
        await client.post("/instances/drain", json={"id": "d0"}, headers={"X-Api-Key": "sesame-22"})

    assert (before, after) == ([OPENED, CLOSED], [CLOSED, OPENED])
    assert fingerprint(b"sesame-22") in caplog.text
    assert "sesame" not in caplog.text


@pytest.mark.parametrize("path", PATHS[:-1])
async def test_the_name_of_an_engine_is_short(path):
    """Whatever the router lets clients send."""
    async with router(sims(), OPEN) as client:
        fits = await client.post(path, content=b'{"id":"d0"}'.ljust(SMALL_BODY), headers=KEY)
        long = await client.post(path, content=b'{"id":"d0"}'.ljust(SMALL_BODY + 1), headers=KEY)

    assert fits.status_code in (400, 404)
    assert long.status_code == 413


def explain(**fields):
    return json.dumps({"path": "/v1/completions", "body": {"prompt": "a"}} | fields).encode()


HOSTILE = {
    "names": (PATHS[-1], b"{%b}" % b",".join(b'"%d":1' % number for number in range(5000))),
    "headers": (PATHS[-1], explain(headers={f"x-{number}": "" for number in range(65)})),
    "a header": (PATHS[-1], explain(headers={"x": "y" * 8193})),
    "an empty name": (PATHS[-1], explain(headers={"": "y"})),
    "long headers": (PATHS[-1], explain(headers=["y"] * SMALL_BODY)),
    "a path": (PATHS[-1], explain(path="/" + "x" * 300)),
    "no body": (PATHS[-1], b'{"path":"/v1/completions"}'),
    "more": (PATHS[-1], explain(more=1)),
    "a long name": (PATHS[-2], b'{"%b":1}' % (b"x" * 60_000)),
    "a name in two lines": (PATHS[-2], b'{"a\\nb":1}'),
    "an id": (PATHS[-2], b'{"id":"%b"}' % (b"x" * 301)),
    "no id": (PATHS[-2], b'{"id":""}'),
    "deep": (PATHS[-2], b'{"id":' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
    "a number": (PATHS[-2], b'{"id":' + b"9" * 50_000 + b"}"),
    "NaN": (PATHS[-2], b'{"id":NaN}'),
    "half": (PATHS[-2], b'{"id":'),
    "nothing": (PATHS[-2], b""),
    "not UTF-8": (PATHS[-2], b'{"id":"\xff"}'),
    "a lone surrogate": (PATHS[-2], b'{"id":"\\ud800"}'),
    "a role": (PATHS[-2], b'{"type":"both","instance":"d0:80"}'),
    "many faults": (PATHS[-2], json.dumps({str(number): [] for number in range(4000)}).encode()),
}


@pytest.mark.parametrize(("path", "body"), HOSTILE.values(), ids=HOSTILE)
async def test_what_is_wrong_with_a_body_is_said_in_one_short_sentence(path, body):
    """It does not repeat what was sent."""
    async with router(sims(), OPEN) as client:
        answer = await client.post(path, content=body, headers=KEY)

    detail = answer.json()["detail"]
    assert (answer.status_code, answer.json().keys()) == (400, {"detail"})
    assert detail.startswith("The body is not what this route takes: ")
    assert len(detail) < 300
    assert "\n" not in detail


async def test_a_body_of_another_type_is_refused_but_where_the_demo_takes_it():
    """A page of another web site could send a form unasked."""
    form = KEY | {"content-type": "application/x-www-form-urlencoded"}
    async with router(sims(), OPEN) as client:
        statuses = [(await client.post(path, content=b"{}", headers=form)).status_code for path in PATHS]

    assert statuses == [400] + [415] * (len(PATHS) - 1)


async def test_a_body_that_is_refused_stands_in_the_audit_log(caplog):
    """Who has the key tried something."""
    with caplog.at_level(logging.INFO, "pdrelay.audit"):
        async with router(sims(), OPEN) as client:
            await client.post("/instances/drain", content=b'{"id":7}', headers=KEY)

    (line,) = [record.getMessage() for record in caplog.records if record.name == "pdrelay.audit"]
    assert "action=drain outcome=refused" in line
    assert "id: Input should be a valid string" in line


async def test_the_operators_key_is_enough_where_clients_need_one(key_files):
    """On every path for operators, also one that is added tomorrow; what is wrong there is said in FastAPI's format."""
    settings = replace(OPEN, api_keys_file=str(key_files / "keys"))
    paths = {one.path for one in build(settings).app.routes if OPERATORS in getattr(one, "tags", ())}
    async with router(sims(), settings) as client:
        answers = {path: await client.patch(re.sub("{.*}", "x", path), headers=KEY) for path in paths}

    assert {"/instances", "/instances/drain"} < paths
    assert [path for path in paths if answers[path].json() != {"detail": "Method Not Allowed"}] == []
