"""What a web page can have a browser send to a router that wants no keys, and what others send it all the same."""

import json
from contextlib import ExitStack

import httpx
import pytest

from support.router_process import router_processes
from support.sim import fleet

pytestmark = pytest.mark.processes


BODY = {"model": "sim", "prompt": "a", "max_tokens": 2}
RAW = json.dumps(BODY).encode()
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """One router as `pdrelay serve` starts it without further ado, one that wants keys, and an engine."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("a:key-of-17-letters\n")
    with fleet() as (engines, _, flags), ExitStack() as stack:
        args = (*flags, "--health-check-interval", "0")
        (free,) = stack.enter_context(router_processes(tmp_path_factory.mktemp("free"), 1, *args))
        args = (*args, "--api-keys-file", str(keys))
        (closed,) = stack.enter_context(router_processes(tmp_path_factory.mktemp("closed"), 1, *args))
        yield free.url, closed.url, engines


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        (JSON | {"origin": "https://evil.example"}, 403, "another web site"),
        (JSON | {"origin": "null"}, 403, "another web site"),
        (JSON | {"sec-fetch-site": "cross-site"}, 403, "another web site"),
        (JSON | {"sec-fetch-site": "same-site"}, 403, "another web site"),
        (JSON | {"host": "evil.example"}, 421, "'evil.example'"),
        ({}, 415, "application/json"),
        ({"content-type": "text/plain"}, 415, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ],
)
def test_a_page_cannot_use_an_open_router(stage, headers, status, word):
    """No engine hears of it, and the answer says what to do."""
    free, closed, engines = stage
    before = len(engines["d0"].log)
    answer = httpx.post(f"{free}/v1/completions", content=RAW, headers=headers, timeout=20)

    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]
    assert len(engines["d0"].log) == before
    with_key = httpx.post(
        f"{closed}/v1/completions",
        content=RAW,
        headers=headers | {"authorization": "Bearer key-of-17-letters"},
        timeout=20,
    )
    assert with_key.status_code == (415 if "content-type" in headers and status == 415 else 200)


@pytest.mark.parametrize("path", ["/", "/health", "/status", "/stats", "/metrics", "/v1/models", "/openapi.json"])
def test_a_page_whose_name_means_this_address_reads_nothing(stage, path):
    """The addresses of engines, for example."""
    answer = httpx.get(stage[0] + path, headers={"host": "evil.example:80"}, timeout=20)

    assert answer.status_code == 421
    said = answer.json()
    assert "this router is not 'evil.example:80'" in (said["detail"] if path == "/status" else said["error"]["message"])
    assert httpx.get(stage[0] + path, headers={"host": "localhost:80"}, timeout=20).status_code == 200
