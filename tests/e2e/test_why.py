"""``pdrelay why`` on real engines: each part of a request is in a row of its own, in pull and in push.

docs/why.md lists which test puts time into which row.
"""

import contextlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.cluster import (
    MODEL_NAME,
    OVER_TCP,
    base_url,
    engine_spec,
    metrics,
    router_command,
    start_engine,
    wait_until,
)
from support.pacing import SLOW_S, paced, slow_prompt
from support.proc import pids_of, wait_stopped
from support.valves import Passing, open_valves

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
KEY = {"X-Api-Key": "sesame"}
FROZEN_S = 0.3
LONGER_S = 1.0  # that a whole engine stands still: of less, what its other threads do late would be a large part
ATTEMPTS = 5  # a busy machine takes 0.1 s of its own in some of them; time in a wrong row is there in each
STEP = 512  # tokens that an engine computes at once, at most
TOKEN_S = 0.001  # that P takes for each token of a prompt
SLOW_MS = SLOW_S * 1e3
WAITING = "vllm:pdrelay_requests_waiting_for_remote_kv"
RUNNING = "vllm:num_requests_running"
TOKENS = "vllm:generation_tokens_total"
LOADING = ("allocate blocks", "order to the worker", "handshake", "read KV", "fence")
CLIENT_ID = "of-this-test"


@pytest.fixture(scope="module", params=[TransferMode.PULL, TransferMode.PUSH], ids=str)
def pair(request, fleet, model):
    """One engine of each role that keeps timelines, and a router; in pull also a decode engine that P has not met.

    A valve is between each engine and its router. In pull the second decode engine needs P for each read, as over a
    network; the first reads P's memory by itself, as it can on one host, but now and then UCX waits for P there, too.
    In push P needs D for each write.
    """
    mode = request.param

    def engine(name, role, **more):
        spec = engine_spec(
            f"why-{name}-{mode}", model, role=role, connector=Connector.PDRELAY, mode=mode, timelines=True,
            extra_args=("--max-num-batched-tokens", str(STEP)), **more,
        )  # fmt: skip
        spec = paced(spec, 0, TOKEN_S if role is Role.PREFILL else 0, 0)
        return spec, start_engine(fleet, spec)

    far = {"extra_env": OVER_TCP}
    p = engine("prefill", Role.PREFILL)
    d = engine("decode", Role.DECODE, **({} if mode is TransferMode.PULL else far))
    others = [engine("far", Role.DECODE, **far)] if mode is TransferMode.PULL else []
    decoders = [d, *others]
    with open_valves([spec for spec, _ in (p, *decoders)]) as (prefill_valve, *valves):
        commands = [
            router_command(f"why-router-{number}", [prefill_valve], [valve], env={"ADMIN_API_KEY": KEY["X-Api-Key"]})
            for number, valve in enumerate(valves)
        ]
        routers = [fleet.start(command) for command in commands]
        children = [p[1], *(child for _, child in decoders)]
        fleet.wait_ready([*children, *routers], timeout_s=300)
        urls = [base_url(command) for command in commands]
        ask(urls[0], [9] * 50)  # both meet, and the router learns how P moves KV
        decode_sides = [
            SimpleNamespace(router=url, valve=valve, spec=spec)
            for url, valve, (spec, _) in zip(urls, valves, decoders, strict=True)
        ]
        pids = {Role.PREFILL: p[1].pid, Role.DECODE: d[1].pid}
        yield SimpleNamespace(
            mode=mode, router=urls[0], pids=pids, prefill=p[0], prefill_valve=prefill_valve,
            near=decode_sides[0], far=decode_sides[-1],
        )  # fmt: skip
        fleet.stop(*routers, *children)


only_in_pull = pytest.mark.parametrize("pair", [TransferMode.PULL], indirect=True, ids=str)
only_in_push = pytest.mark.parametrize("pair", [TransferMode.PUSH], indirect=True, ids=str)


def ask(router, prompt, tokens=8, *, stream=True):
    """Get an answer; return the request's name, and the milliseconds that its client waited."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0}
    with httpx.Client(base_url=router, timeout=120) as client:
        client.get("/health")  # httpx has its connection, and its certificates read
        began = time.monotonic()
        response = client.post("/v1/completions", json=body, headers={"x-request-id": CLIENT_ID})
        waited = (time.monotonic() - began) * 1e3
    assert response.text.endswith("data: [DONE]\n\n") if stream else response.json()["choices"], response.text
    return response.headers["x-pdrelay-request-id"], waited


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


def outer_ms(found):
    """Return what the router's own rows add up to."""
    return sum(row["duration_ms"] for row in found["rows"] if not row["leg"])


def ms(found, leg, *whats):
    return sum(row["duration_ms"] for row in found["rows"] if row["leg"] == leg and row["what"] in whats)


def check_sum(found, waited):
    """The router's rows have no gaps, and the client has waited for them.

    That it has waited for nothing else is asked of several attempts (``check_only_slow``): it may get no core itself.
    """
    assert outer_ms(found) == pytest.approx(found["duration_ms"], abs=1)
    assert outer_ms(found) <= 1.05 * waited


def inner_ms(found):
    """Return how long each row of the engines took, but for a lease, which goes on beside them."""
    took = {}
    for row in found["rows"]:
        if row["leg"] and row["what"] != "lease":
            key = row["leg"].removesuffix("-0"), row["what"]
            took[key] = took.get(key, 0) + round(row["duration_ms"])
    return took


def check_only_slow(try_once, *rows, most_ms=2 * SLOW_MS):
    """These rows of the engines have what was put into them in each attempt, and no other one has it in each.

    A busy machine adds to any row, but what goes into a wrong row goes there in each attempt. The same holds for the
    sum. ``try_once`` is given the attempt's number, and returns what the router shows and what the client waited.
    """
    least = {}
    off = inf
    seen = []
    for attempt in range(ATTEMPTS):
        found, waited = try_once(attempt)
        took = inner_ms(found)
        seen.append({"outer": outer_ms(found), "waited": waited, **took})
        assert min(took.get(row, 0) for row in rows) >= SLOW_MS, seen
        least = {row: min(took.get(row, 0), least.get(row, inf)) for row in {*took, *least}}
        off = min(off, abs(outer_ms(found) / waited - 1))
        other = max(milliseconds for row, milliseconds in least.items() if row not in rows)
        # Decoding takes what it takes, 150 ms on a busy machine. What is put into a wrong row makes it longer.
        if max(least[row] for row in rows) < most_ms and other < SLOW_MS and off <= 0.05:
            return found
    pytest.fail("\n".join(map(str, seen)))


def test_each_part_of_a_request_has_a_row(pair):
    """The prompt is computed in chunks; D gets its KV, and computes the last token itself."""
    mode, router = pair.mode, pair.router
    name, waited = ask(router, [7 + number % 400 for number in range(1200)], 300)
    found = timeline(router, name, of={"prefill-0", "decode-0"})

    assert found["notes"] == []
    check_sum(found, waited)
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


P, D = Role.PREFILL, Role.DECODE


def check_slow(pair, role, row):
    """One of the engines sleeps in a row: all that it has to do is this request."""
    slow = P if row == "fence" else role  # P confirms, and D waits for it

    def try_once(attempt):
        name, waited = ask(pair.near.router, slow_prompt(slow, row, attempt))
        return timeline(pair.near.router, name, of={"prefill-0", "decode-0"}), waited

    rows = [(str(role), row)]
    if pair.mode is TransferMode.PUSH and role is P:
        rows.append((str(D), "wait for the writes of P"))  # beside what P does
    found = check_only_slow(try_once, *rows)

    outer = {"decode": "stream", "write KV": "decode leg"}.get(row, f"{role} leg")  # P answers before it has written
    beside = SLOW_MS / 2 if pair.mode is TransferMode.PUSH else 0  # in push, the other leg has a part of it
    assert ms(found, "", outer) >= SLOW_MS - beside, found["rows"]


@only_in_pull
@pytest.mark.parametrize(
    ("role", "row"),
    [
        *((role, row) for role in Role for row in ("API server", "wait in the queue", "wait for a step", "compute")),
        *((D, row) for row in ("allocate blocks", "order to the worker", "read KV", "fence", "decode")),
    ],
)
def test_200_ms_of_an_engine_show_in_their_row(pair, role, row):
    """In no other one, and the rows add up to what the client waited, within 5 %."""
    check_slow(pair, role, row)


@only_in_push
@pytest.mark.parametrize(
    ("role", "row"),
    [(P, "compute"), (P, "write KV"), (D, "allocate blocks"), (D, "wait for a step"), (D, "decode")],
)
def test_200_ms_of_an_engine_that_pushes_show_in_their_row(pair, role, row):
    """The same; what is as in pull is left out."""
    check_slow(pair, role, row)


@pytest.mark.parametrize("role", list(Role), ids=str)
def test_an_engine_that_does_not_move_shows_in_its_own_leg(pair, role):
    """It is frozen, and its leg waits for it: that is where the time went."""
    router, pids = pair.router, pair.pids
    os.kill(pids[role], signal.SIGSTOP)
    try:
        wait_stopped(pids[role])
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


def test_a_busy_prefill_engine_shows_in_the_rows_of_its_queue_and_its_steps(pair):
    """Two prompts are computed for four seconds. Another one comes meanwhile, and steps are full until then."""
    long = [[first + number % 300 for number in range(1990)] for first in (21, 22)]
    short = [23] * 400
    with ThreadPoolExecutor() as pool:
        first, _ = [pool.submit(ask, pair.router, prompt) for prompt in long]
        wait_until(lambda: metrics(pair.prefill).get(RUNNING, 0) > 0, seconds=30, what="P computes a prompt")
        second = pool.submit(ask, pair.router, short)
        names = [asked.result() for asked in (first, second)]
    shown = [(timeline(pair.router, name, of={"prefill-0", "decode-0"}), waited) for name, waited in names]
    (computed, _), (queued, _) = shown

    assert ms(computed, "prefill-0", "compute") >= 0.9 * len(long[0]) * TOKEN_S * 1e3
    assert ms(queued, "prefill-0", "wait in the queue") >= 0.9 * STEP * TOKEN_S * 1e3
    assert ms(queued, "prefill-0", "compute") >= 0.9 * len(short) * TOKEN_S * 1e3
    for found, waited in shown:
        check_sum(found, waited)


@contextlib.contextmanager
def frozen(leader):
    """Stop an engine: its core, which computes and answers D, is a process of its own behind the API server."""
    os.killpg(leader, signal.SIGSTOP)
    try:
        wait_stopped(*pids_of(leader))
        yield
    finally:
        os.killpg(leader, signal.SIGCONT)


def while_p_stands_still(pair, side, prompt, seconds=1.5 * LONGER_S):
    """Have D load while P is frozen, from before it begins until so long after; return the rows.

    That is more than `LONGER_S`: D's threads may begin a little later.

    P has computed the prompt by then: the leg to D waits in the valve until P is frozen.
    """
    legs = side.valve.seen[Passing.REQUEST]
    side.valve.hold(Passing.REQUEST)
    with ThreadPoolExecutor() as pool:
        try:
            asked = pool.submit(ask, side.router, prompt)
            wait_until(lambda: side.valve.seen[Passing.REQUEST] > legs, seconds=60, what="the leg to D is sent")
            with frozen(pair.pids[Role.PREFILL]):
                side.valve.release()
                wait_until(lambda: metrics(side.spec).get(WAITING) == 1, seconds=20, what="D loads")
                time.sleep(seconds)
        finally:
            side.valve.release()
        name, waited = asked.result()
    return timeline(side.router, name, of={"prefill-0", "decode-0"}), waited


def is_longest(shown, what):
    """Whether no other part of the load took nearly as long as one, which took `LONGER_S` more."""
    found, waited = shown
    took = {row: round(ms(found, "decode-0", row)) for row in LOADING}
    others = sum(milliseconds for row, milliseconds in took.items() if row != what)
    assert took[what] >= LONGER_S * 1e3, str(took)
    check_sum(found, waited)
    print(took)
    return others < took[what] / 2


@only_in_pull
def test_a_slow_handshake_and_then_a_slow_read_show_in_their_rows(pair):
    """The same engines stand still at the same point: first they have to meet, and the next time only to read.

    They meet once, so there is no second attempt at the handshake: it has to stand still for longer.
    """
    assert is_longest(while_p_stands_still(pair, pair.far, [11] * 200, seconds=3 * LONGER_S), "handshake")
    attempts = (while_p_stands_still(pair, pair.far, [12 + number] * 200) for number in range(ATTEMPTS))
    assert any(is_longest(shown, "read KV") for shown in attempts)


def held(valve, what, router, prompt, *, stream):
    """Keep a leg's request or answer on its way for some time; return the rows, and what the client waited."""
    valve.hold(what)
    valve.on(what, 1, valve.release, after=SLOW_S)
    try:
        name, waited = ask(router, prompt, stream=stream)
    finally:
        valve.release()
    return timeline(router, name, of={"prefill-0", "decode-0"}), waited


@only_in_pull
@pytest.mark.parametrize(
    ("leg", "passing", "row", "stream"),
    [
        ("prefill", Passing.REQUEST, "reach the engine", True),
        ("prefill", Passing.ANSWER, "answer", True),
        ("decode", Passing.REQUEST, "reach the engine", True),
        ("decode", Passing.ANSWER, "answer", False),
    ],
)
def test_200_ms_between_the_router_and_an_engine_show_in_the_row_of_their_half(pair, leg, passing, row, stream):
    """They belong to that leg; the router itself hands over within its turn."""
    valve = pair.prefill_valve if leg == "prefill" else pair.near.valve
    first = 50 + 10 * len(row) + len(leg)
    found = check_only_slow(
        lambda attempt: held(valve, passing, pair.near.router, [first + attempt] * 40, stream=stream), (leg, row)
    )

    assert ms(found, "", f"{leg} leg") >= SLOW_MS
    assert ms(found, "", "hand over") < SLOW_MS / 2


def test_200_ms_of_a_first_event_on_its_way_show_in_its_row(pair):
    """D has sent the head before it had a token. The answer is kept until D has had one for so long."""
    side = pair.near

    def try_once(attempt):
        tokens = metrics(side.spec).get(TOKENS, 0)
        side.valve.hold(Passing.ANSWER)
        with ThreadPoolExecutor() as pool:
            try:
                asked = pool.submit(ask, side.router, [300 + attempt] * 40)
                wait_until(lambda: metrics(side.spec)[TOKENS] > tokens, seconds=60, what="D has a token")
                time.sleep(SLOW_S)
            finally:
                side.valve.release()
            name, waited = asked.result()
        return timeline(side.router, name, of={"prefill-0", "decode-0"}), waited

    found = check_only_slow(try_once, ("decode", "first event"))

    assert ms(found, "", "decode leg") >= SLOW_MS


@only_in_push
def test_200_ms_of_a_client_that_leaves_before_a_token_show_in_the_row_finish(pair):
    """Whatever its engine waited for: here D waits for the writes of P, which does not get its leg."""
    router, valve = pair.near.router, pair.prefill_valve

    def try_once(attempt):
        name = f"leaves-{attempt}"
        body = json.dumps({"model": MODEL_NAME, "prompt": [350 + attempt] * 40, "max_tokens": 8}).encode()
        host, port = router.removeprefix("http://").split(":")
        valve.hold(Passing.REQUEST)
        try:
            began = time.monotonic()
            with socket.create_connection((host, int(port)), timeout=60) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                head += f"X-Request-Id: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall(head.encode() + body)
                wait_until(lambda: metrics(pair.near.spec).get(WAITING) == 1, seconds=60, what="D waits for the writes")
                time.sleep(SLOW_S)
            waited = (time.monotonic() - began) * 1e3
            wait_until(lambda: metrics(pair.near.spec).get(WAITING) == 0, seconds=60, what="D has given it up")
        finally:
            valve.release()
        return timeline(router, name, of={"decode-0"}), waited

    found = check_only_slow(try_once, ("decode", "finish"), most_ms=inf)  # it is looked at now and then

    assert found["outcome"] == "client_disconnected"


@only_in_push
def test_slow_writes_show_in_the_rows_of_both_engines(pair):
    """P computes the prompt only once D stands still, and has answered the router before its writes end."""
    assert any(are_slow_writes(pair, [60 + number] * 200) for number in range(ATTEMPTS))


def are_slow_writes(pair, prompt):
    """Whether all that P does beside writing took much less, while D stood still."""
    valve = pair.prefill_valve
    answers = pair.prefill_valve.seen[Passing.ANSWER]
    valve.hold(Passing.REQUEST)
    with ThreadPoolExecutor() as pool:
        try:
            asked = pool.submit(ask, pair.router, prompt)
            wait_until(lambda: metrics(pair.near.spec).get(WAITING) == 1, seconds=60, what="D waits for the writes")
            with frozen(pair.pids[Role.DECODE]):
                valve.release()
                wait_until(lambda: valve.seen[Passing.ANSWER] > answers, seconds=60, what="P has computed the prompt")
                time.sleep(LONGER_S)
        finally:
            valve.release()
        name, waited = asked.result()
    found = timeline(pair.router, name, of={"prefill-0", "decode-0"})

    took = {row["what"]: round(row["duration_ms"]) for row in found["rows"] if row["leg"] == "prefill-0"}
    assert took["write KV"] >= LONGER_S * 1e3, str(took)
    assert ms(found, "decode-0", "wait for the writes of P") >= took["write KV"]
    assert ms(found, "", "decode leg") >= LONGER_S * 1e3
    check_sum(found, waited)
    print(took)
    return took["compute"] + took["answer"] < took["write KV"] / 2


def waiting_in(router):
    """What the only request under way waits for."""
    shown = httpx.get(f"{router}/requests/{CLIENT_ID}?engines=false", headers=KEY, timeout=30).json()
    under_way = [found for found in shown.get("requests", ()) if found["state"] != "over"]
    rows = [row["what"] for found in under_way for row in found["rows"] if not row["leg"]]
    return rows[-1] if rows else ""
