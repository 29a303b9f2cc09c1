"""Classes of requests in a whole router: keys, headers, targets, what is counted, and what a reload changes."""

import asyncio
import re
from dataclasses import replace

import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_proxy.testing.engine import FaultKind, Sim, SimulatedFault
from support.clock import Clock
from support.sim import InMemory, router, sims, until_async

CLASSES = ("chat:ttft=0.5", "strict:ttft=0.5,on_miss=refuse,open=true", "batch:rank=9,open=true,max_wait=300")
QUIET = Settings(classes=CLASSES, default_class="chat", health_check_interval_s=0.0)
KEYS = (
    "alice:a-key-of-16-chars class=chat,batch\nbob:b-key-of-16-chars class=batch priority=-3\ncarol:c-key-of-16-chars\n"
)
COUNTED = re.compile(r'pdrelay_slo_requests_total\{class="([a-z]+)",outcome="([a-z]+)"\} (\S+)')
WAITING = re.compile(r'pdrelay_slo_requests_waiting\{class="([a-z]+)"\} (\S+)')
MEASURED = 4  # requests after which an engine's times are known


class SerialSim(Sim):
    """An engine that computes one prompt after the other, and takes so many seconds of the router's clock for each."""

    def __init__(self, role, clock, seconds):
        super().__init__(role)
        self._clock, self._seconds, self._turn = clock, seconds, asyncio.Lock()

    def is_busy(self):
        return self._turn.locked()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            await super().__call__(scope, receive, send)
            return
        async with self._turn:
            end = self._clock.now + self._seconds
            while self._clock.now < end:
                await asyncio.sleep(0)
            await super().__call__(scope, receive, send)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text(KEYS)
    return str(path)


def body(number=0, *, words=40, streams=True):
    text = f"{number} " + "a question " * words
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": streams}


async def ask(client, number=0, name=None, key=None, **more):
    headers = {} if name is None else {"x-request-class": name}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return await client.post(Api.CHAT, json=body(number, **more), headers=headers)


async def counted(client, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    text = (await client.get("/metrics", headers=headers)).text
    outcomes = {(one, outcome): float(count) for one, outcome, count in COUNTED.findall(text)}
    return outcomes, {one: float(count) for one, count in WAITING.findall(text)}


async def learn(client, clock):
    """Have the router measure its engines, also while requests wait there."""
    answers = [await _while_time_passes(clock, ask(client, number, "batch")) for number in range(MEASURED)]
    answers += await _while_time_passes(clock, *[ask(client, number + 5, "batch") for number in range(MEASURED)])
    assert {answer.status_code for answer in answers} == {200}


async def _while_time_passes(clock, *asked, step=0.01):
    """Have the clock run until all of these are answered."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    while not all(task.done() for task in tasks):
        clock.now += step
        await asyncio.sleep(0.001)
    answers = [task.result() for task in tasks]
    return answers if len(answers) > 1 else answers[0]


async def test_the_class_is_that_of_the_key_or_of_the_header(keys):
    """And nobody gets one that the key may not use; what was sent in the header never reaches an engine."""
    engines = sims(1, 1)
    async with router(engines, replace(QUIET, api_keys_file=keys)) as client:
        asked = [
            ("a-key-of-16-chars", None, 200),
            ("a-key-of-16-chars", "batch", 200),
            ("a-key-of-16-chars", "strict", 200),  # it is open
            ("b-key-of-16-chars", None, 200),
            ("b-key-of-16-chars", "chat", 403),
            ("c-key-of-16-chars", None, 200),
            ("c-key-of-16-chars", "gold", 403),
            ("x-key", "batch", 401),
        ]
        answers = [await ask(client, name=name, key=key) for key, name, _ in asked]
        outcomes, _ = await counted(client, "a-key-of-16-chars")

    assert [answer.status_code for answer in answers] == [status for _, _, status in asked]
    assert answers[4].json()["error"] == {
        "message": "this client may not use the class chat: it may use strict or batch",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }
    assert outcomes == {("chat", "met"): 2, ("batch", "unmeasured"): 2, ("strict", "met"): 1}
    sent = [name for engine in engines.values() for entry in engine.log for name in entry.headers]
    assert sent
    assert "x-request-class" not in sent


@pytest.mark.parametrize(
    "headers",
    [
        [("x-request-class", "batch"), ("x-request-class", "strict")],
        [("x-request-class", "batch, strict")],
        [("x-request-class", "")],
        [("x-request-class", "a" * 4000)],
        [("x-request-class", "\xff\x00"[:1])],
        [("X-REQUEST-CLASS", "chat ; rank=0")],
        [("x-request-class", "%62atch")],
    ],
)
async def test_hostile_headers(headers):
    """Each is refused, in a short sentence that repeats nothing odd; none is served in some class."""
    engines = sims(1, 1)
    async with router(engines, QUIET) as client:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        answer = await client.post(Api.CHAT, json=body(), headers=[*raw, (b"content-type", b"application/json")])

    assert answer.status_code in (400, 403)
    assert len(answer.json()["error"]["message"]) < 200
    assert not engines["p0"].log


async def test_without_classes_the_header_means_nothing():
    """As before there were any."""
    async with router(sims(1, 1), Settings(health_check_interval_s=0.0)) as client:
        answer = await ask(client, name="gold")
        outcomes, waiting = await counted(client)

    assert answer.status_code == 200
    assert (outcomes, waiting) == ({}, {})


async def test_a_strict_class_is_refused_what_it_would_miss():
    """With 503, when to try again, and the numbers; what can still meet its target is served."""
    clock = Clock()
    engines = {"p0": SerialSim("prefill", clock, 0.2), "d0": Sim("decode")}
    async with router(engines, QUIET, clock) as client:
        await learn(client, clock)
        answers = await _while_time_passes(clock, *[ask(client, number + 10, "strict") for number in range(6)])
        outcomes, _ = await counted(client)

    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert 1 <= len(served) <= 3
    assert len(served) + len(refused) == 6
    error = refused[-1].json()["error"]
    assert re.fullmatch(
        r"its first token is expected in \S+ s, \S+ s of them behind others: "
        r"the class strict has a target of 0\.5 s \(class_target\)",
        error["message"],
    )
    assert int(refused[-1].headers["retry-after"]) >= 1
    assert outcomes["strict", "refused"] == len(refused)
    assert outcomes["strict", "met"] >= 1
    assert outcomes["strict", "met"] + outcomes.get(("strict", "missed"), 0) == len(served)


@pytest.mark.parametrize(
    "policy", [PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOADED, PolicyName.PREFIX, PolicyName.EXPECTED_TTFT]
)
async def test_batch_waits_where_it_can_be_passed(policy):
    """Ten batch requests are there first, and chats that come behind them still meet their target, by any policy."""
    clock = Clock()
    engines = {"p0": SerialSim("prefill", clock, 0.1), "d0": Sim("decode")}
    settings = replace(QUIET, prefill_policy=policy, decode_policy=policy)
    async with router(engines, settings, clock) as client:
        await learn(client, clock)
        batch = [asyncio.ensure_future(ask(client, number + 10, "batch")) for number in range(10)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        _, waiting = await counted(client)
        chats = await _while_time_passes(clock, *[ask(client, number + 100) for number in range(2)])
        rest = await _while_time_passes(clock, *batch)
        outcomes, none = await counted(client)

    assert waiting["batch"] >= 6
    assert {answer.status_code for answer in [*chats, *rest]} == {200}
    assert outcomes == {("chat", "met"): 2, ("batch", "unmeasured"): 2 * MEASURED + 10}
    assert none["batch"] == 0


async def test_without_classes_chats_wait_behind_batch():
    """What the test before is about: the same requests, in the order in which they came."""
    clock = Clock()
    engines = {"p0": SerialSim("prefill", clock, 0.1), "d0": Sim("decode")}
    began = clock.now
    async with router(engines, Settings(health_check_interval_s=0.0), clock) as client:
        batch = [asyncio.ensure_future(ask(client, number + 10)) for number in range(10)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        await _while_time_passes(clock, ask(client, 100))
        first = clock.now - began
        await _while_time_passes(clock, *batch)

    assert first > 0.5


async def test_the_status_page_has_the_share_within_targets():
    """Of the last five minutes, and what waits; a class without a target has no share."""
    async with router(sims(1, 1), QUIET) as client:
        for number, name in enumerate(("chat", "chat", "batch")):
            assert (await ask(client, number, name)).status_code == 200
        said = (await client.get("/stats")).json()
    async with router(sims(1, 1), Settings(health_check_interval_s=0.0)) as client:
        assert (await ask(client)).status_code == 200
        plain = (await client.get("/stats")).json()

    assert said["classes"] == [{"name": "chat", "met_per_s": 2 / 60, "met": 2, "missed": 0, "waiting": 0}]
    assert plain["classes"] == []


async def test_what_is_refused_is_in_the_log_and_in_the_metrics(caplog):
    """By the limit, as any other refusal, and with the class."""
    caplog.set_level("INFO", logger="pdrelay.access")
    clock = Clock()
    engines = {"p0": SerialSim("prefill", clock, 5.0), "d0": Sim("decode")}
    async with router(engines, QUIET, clock) as client:
        clock_step = 0.1
        for number in range(MEASURED):
            await _while_time_passes(clock, ask(client, number, "batch"), step=clock_step)
        busy = asyncio.ensure_future(ask(client, 40, "batch"))
        await until_async(engines["p0"].is_busy)
        answer = await ask(client, 50, "strict")
        metrics = (await client.get("/metrics")).text
        await _while_time_passes(clock, busy, step=clock_step)

    assert answer.status_code == 503
    assert 'pdrelay_requests_refused_total{reason="class_target"} 1.0' in metrics
    line = next(record.getMessage() for record in caplog.records if "class='strict" in record.getMessage())
    assert re.search(r"class='strict refused, first token expected in \d+ ms'", line)


async def test_a_request_that_fails_is_neither_met_nor_missed():
    """An engine's fault is no matter of admission."""
    engines = sims(1, 1)
    async with router(engines, replace(QUIET, retries=0)) as client:
        engines["d0"].inject(SimulatedFault(FaultKind.STATUS, status=500))
        assert (await ask(client)).status_code == 500
        outcomes, _ = await counted(client)

    assert outcomes == {("chat", "failed"): 1}


async def test_an_answer_that_is_no_stream_shows_no_time():
    """So it is neither within its targets nor beyond them."""
    async with router(sims(1, 1), QUIET) as client:
        assert (await ask(client, streams=False)).status_code == 200
        outcomes, _ = await counted(client)

    assert outcomes == {("chat", "unmeasured"): 1}


async def test_a_client_that_does_not_want_to_wait():
    """It leaves the queue, and nobody else has to wait for it."""
    clock = Clock()
    engines = {"p0": SerialSim("prefill", clock, 0.3), "d0": Sim("decode")}
    async with router(engines, QUIET, clock) as client:
        await learn(client, clock)
        under_way = [asyncio.ensure_future(ask(client, number + 10, "batch")) for number in range(4)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (await counted(client))[1]["batch"] >= 2
        under_way[-1].cancel()
        await asyncio.gather(under_way[-1], return_exceptions=True)
        await _while_time_passes(clock, *under_way[:-1])
        outcomes, waiting = await counted(client)

    assert outcomes["batch", "disconnected"] == 1
    assert waiting["batch"] == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "alice:a-key-of-16-chars class=gold",
            "gives alice the class gold, which is not a class: write chat, strict or batch",
        ),
        ("alice:a-key-of-16-chars class=", "line 1, is not a key: write name:key .*class=NAME,NAME"),
        ("alice:a-key-of-16-chars class=chat class=batch", "line 1, is not a key"),
        (
            "alice:a-key-of-16-chars class=chat\nalice:b-key-of-16-chars",
            "line 2, gives alice other classes: write the same on each",
        ),
    ],
)
def test_a_wrong_file_of_keys(tmp_path, text, says):
    """Found at start."""
    path = tmp_path / "keys.txt"
    path.write_text(text)

    with pytest.raises(ConfigError, match=says):
        build(replace(QUIET, api_keys_file=str(path)))


def test_keys_with_classes_where_there_are_none(tmp_path):
    """Somebody expects targets to be kept."""
    path = tmp_path / "keys.txt"
    path.write_text("alice:a-key-of-16-chars class=gold")

    with pytest.raises(ConfigError, match="gives alice the class gold, and the settings have no classes"):
        build(Settings(api_keys_file=str(path)))


async def test_classes_are_read_again():
    """All of the settings or, if one is wrong, none; those of a router without classes need a restart."""
    built = build(replace(QUIET, prefill=("p0:80",), decode=("d0:80",)), fabric=InMemory(sims(1, 1)).fabric)
    gate = built.requests.gate
    before = built.requests.settings
    after = replace(before, classes=(*CLASSES, "new:rank=3"), default_class="new")
    built.live.prepared(before, after)()
    assert gate.admission.levels.classes.default.name == "new"

    with pytest.raises(ConfigError, match="default_class is 'old', which is not a class"):
        built.live.prepared(after, replace(after, default_class="old"))
    plain = build(Settings(prefill=("p0:80",), decode=("d0:80",)), fabric=InMemory(sims(1, 1)).fabric)
    with pytest.raises(ConfigError, match="none when the router started, so it measures no engine: restart it"):
        plain.live.prepared(
            plain.requests.settings, replace(plain.requests.settings, classes=CLASSES, default_class="chat")
        )
