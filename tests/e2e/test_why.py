"""``xpyd why`` on real engines: each part of a request is in a row of its own, in pull and in push."""

import os
import signal
import time

import httpx
import pytest

from support.cluster import MODEL_NAME, base_url, engine_spec, router_command, start_engine
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.local.recipe import Connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
KEY = {"X-Api-Key": "sesame"}
STOPPED_S = 0.4


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
    began = time.monotonic()
    response = httpx.post(f"{router}/v1/completions", json=body, timeout=120)
    assert response.text.endswith("data: [DONE]\n\n"), response.text
    return response.headers["x-request-id"], (time.monotonic() - began) * 1e3


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
    name, waited = ask(router, [7 + number % 400 for number in range(1200)])
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
    assert outer == pytest.approx(waited, rel=0.05, abs=20)  # httpx opens a connection and closes it


@pytest.mark.parametrize("role", list(Role), ids=str)
def test_an_engine_that_does_not_move_shows_in_its_own_leg(pair, role):
    """It is frozen before the request comes: that is where the time went."""
    _, router, pids = pair
    name = None
    os.kill(pids[role], signal.SIGSTOP)
    try:
        timer = _resume_later(pids[role])
        name, _ = ask(router, [3] * 100)
        timer.join()
    finally:
        os.kill(pids[role], signal.SIGCONT)
    found = timeline(router, name, of={"prefill-0", "decode-0"})

    leg = f"{role}-0"
    assert ms(found, leg, "reach the engine", "API server") >= STOPPED_S * 1e3 * 0.5


def _resume_later(pid):
    import threading

    timer = threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT))
    timer.start()
    return timer
