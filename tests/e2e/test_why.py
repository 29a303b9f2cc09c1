"""``xpyd why`` on real engines: each part of a request is in a row of its own, in pull and in push."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.cluster import MODEL_NAME, base_url, engine_spec, router_command, start_engine, wait_until
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.local.recipe import Connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
KEY = {"X-Api-Key": "sesame"}
FROZEN_S = 0.3
CLIENT_ID = "of-this-test"


@pytest.fixture(scope="module", params=[TransferMode.PULL, TransferMode.PUSH], ids=str)
def pair(request, fleet, model):
    """One engine of each role that keeps timelines, and a router."""
    mode = request.param
    specs = {
        role: engine_spec(
            f"why-{role}-{mode}", model, role=role, connector=Connector.XPYD, mode=mode, timelines=True,
            extra_args=("--max-num-batched-tokens", "512"),
        )
        for role in Role
    }  # fmt: skip
    children = {role: start_engine(fleet, spec) for role, spec in specs.items()}
    router = router_command(
        "why-router", [specs[Role.PREFILL]], [specs[Role.DECODE]], env={"ADMIN_API_KEY": KEY["X-Api-Key"]}
    )
    served = fleet.start(router)
    fleet.wait_ready([*children.values(), served], timeout_s=300)
    ask(base_url(router), [9] * 50)  # both meet, and the router learns how P moves KV
    yield mode, base_url(router), {role: child.pid for role, child in children.items()}
    fleet.stop(served)
    for child in children.values():
        fleet.stop(child)


def ask(router, prompt, tokens=8):
    """Stream an answer; return the request's name, and the milliseconds that its client waited."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    with httpx.Client(base_url=router, timeout=120) as client:
        client.get("/health")  # httpx has its connection, and its certificates read
        began = time.monotonic()
        response = client.post("/v1/completions", json=body, headers={"x-request-id": CLIENT_ID})
        waited = (time.monotonic() - began) * 1e3
    assert response.text.endswith("data: [DONE]\n\n"), response.text
    return response.headers["x-xpyd-request-id"], waited


def timeline(router, name, *, of):
    """Return the rows of a request once all its engines have told theirs, which come with their steps."""
    deadline = time.monotonic() + 60
    while True:
        (found,) = httpx.get(f"{router}/requests/{name}", headers=KEY, timeout=30).json()["requests"]
        known = {row["leg"] for row in found["rows"] if row["what"] in ("finish", "decode", "compute")}
        if known == of:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def ms(found, leg, *whats):
    return sum(row["duration_ms"] for row in found["rows"] if row["leg"] == leg and row["what"] in whats)


def test_each_part_of_a_request_has_a_row(pair):
    """The prompt is computed in chunks; D gets its KV, and computes the last token itself."""
    mode, router, _ = pair
    name, waited = ask(router, [7 + number % 400 for number in range(1200)], 300)
    found = timeline(router, name, of={"prefill-0", "decode-0"})

    assert found["notes"] == []
    prefill = [row["what"] for row in found["rows"] if row["leg"] == "prefill-0"]
    decode = [row["what"] for row in found["rows"] if row["leg"] == "decode-0"]
    chunks = next(row["note"] for row in found["rows"] if (row["leg"], row["what"]) == ("prefill-0", "compute"))
    assert chunks.count("tokens") >= 3
    assert {"reach the engine", "API server", "wait in the queue", "compute"} <= set(prefill) & set(decode)
    if mode is TransferMode.PULL:
        assert {"read KV", "fence"} <= set(decode)
        assert "lease" in prefill
    else:
        assert "wait for the writes of P" in decode
        assert "write KV" in prefill
    outer = sum(row["duration_ms"] for row in found["rows"] if not row["leg"])
    assert outer == pytest.approx(waited, rel=0.05)


@pytest.mark.parametrize("role", list(Role), ids=str)
def test_an_engine_that_does_not_move_shows_in_its_own_leg(pair, role):
    """It is frozen, and its leg waits for it: that is where the time went."""
    _, router, pids = pair
    os.kill(pids[role], signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, router, [3] * 100)
            wait_until(lambda: waiting_in(router) == f"{role} leg", seconds=60, what=f"the {role} leg is sent")
            time.sleep(FROZEN_S)
            os.kill(pids[role], signal.SIGCONT)
            name, _ = asked.result()
    finally:
        os.kill(pids[role], signal.SIGCONT)
    found = timeline(router, name, of={"prefill-0", "decode-0"})

    assert ms(found, f"{role}-0", "reach the engine", "API server") >= FROZEN_S * 1e3


def waiting_in(router):
    """What the only request under way waits for."""
    shown = httpx.get(f"{router}/requests/{CLIENT_ID}?engines=false", headers=KEY, timeout=30).json()
    under_way = [found for found in shown.get("requests", ()) if found["state"] != "over"]
    rows = [row["what"] for found in under_way for row in found["rows"] if not row["leg"]]
    return rows[-1] if rows else ""
