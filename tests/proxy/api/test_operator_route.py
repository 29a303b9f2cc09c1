"""The way into routes for operators: the key, the size of the body, and a sentence about what is wrong with it."""

import json
import logging

import pytest

from support.sim import router, sims
from xpyd_proxy.api.operator_route import SMALL_BODY
from xpyd_proxy.app import build
from xpyd_proxy.settings import Settings

KEY = {"X-Api-Key": "sesame", "content-type": "application/json"}
OPEN = Settings(admin_key="sesame", probe_interval_s=0.0)
PATHS = ("/instances/add", "/instances/remove", "/instances/drain", "/instances/undrain", "/instances/explain")


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

    assert statuses == [400, 415, 415, 415, 415]


async def test_a_body_that_is_refused_stands_in_the_audit_log(caplog):
    """Who has the key tried something."""
    with caplog.at_level(logging.INFO, "xpyd.audit"):
        async with router(sims(), OPEN) as client:
            await client.post("/instances/drain", content=b'{"id":7}', headers=KEY)

    (line,) = [record.getMessage() for record in caplog.records if record.name == "xpyd.audit"]
    assert "action=drain outcome=refused" in line
    assert "id: Input should be a valid string" in line
