"""What operators choose, and what they are told: against the port of a router process, as its clients meet it."""

import base64
import hashlib
import json
import socket
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from pdrelay_tools.simulated.engine import Sim
from support.router_process import KEY, RouterProcess, router_processes
from support.sim import fleet, serving, sims

pytestmark = pytest.mark.processes


PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class Running:
    """A router process and the engines behind it."""

    router: RouterProcess
    engines: dict[str, Sim]
    at: dict[str, str]  # host:port of the engines

    def post(self, path=PATH, body=BODY, **options):
        return httpx.post(self.router.url + path, **{"json": body, "timeout": 30} | options)

    def get(self, path, **options):
        return httpx.get(self.router.url + path, timeout=30, **options)

    def states(self):
        return {row["state"] for row in self.get("/instances", headers=KEY).json()["instances"]}


@contextmanager
def running(folder, *args, env=None, **options) -> Generator[Running]:
    with fleet(**options) as (engines, at, _), ExitStack() as stack:
        known = ["--prefill", at["p0"], "--decode", at["d0"]]
        (router,) = stack.enter_context(router_processes(folder, 1, *known, *args, env=env))
        yield Running(router, engines, at)


KEYS = "team-a:sk-a-of-16-chars\nteam-b:sk-b-of-16-chars\nprometheus:sk-p-of-16-chars\n"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return str(path)


LOOKS = ("/", "/stats", "/metrics")


def basic(password):
    return {"authorization": "Basic " + base64.b64encode(b"anybody:" + password.encode()).decode()}


def test_what_shows_the_fleet_needs_a_key_where_clients_do(tmp_path, keys):
    """It names engines, and how busy each is. Prometheus sends a bearer token, a browser asks for a password."""
    with running(tmp_path, "--api-keys-file", keys) as fleet:
        bare = [fleet.get(path) for path in LOOKS]
        wrong = [
            fleet.get(path, headers=shown)
            for path in LOOKS
            for shown in (bearer("sk"), basic("sk"), {"x-api-key": "sk"})
        ]
        right = [fleet.get(path, headers=shown) for path in LOOKS for shown in (bearer("sk-p-of-16-chars"), KEY)]
        browser = [fleet.get(path, headers=basic("sk-p-of-16-chars")).status_code for path in LOOKS]
        generating = fleet.post(headers=basic("sk-p-of-16-chars"))
        probes = [fleet.get(path).status_code for path in ("/health", "/ready")]

    assert {answer.status_code for answer in bare + wrong} == {401}
    assert [answer.headers["www-authenticate"] for answer in bare] == ['Basic realm="pdrelay", Bearer'] * 2 + ["Bearer"]
    assert {answer.status_code for answer in right} == {200}
    assert browser == [200, 200, 401]
    assert generating.status_code == 401  # a browser sends passwords with requests that other pages make
    assert probes == [200, 200]


def test_the_operator_may_open_what_shows_the_fleet(tmp_path, keys):
    """Behind a network policy, say, for a scraper that cannot send a token."""
    with running(tmp_path, "--api-keys-file", keys, "--public-metrics", "true") as fleet:
        assert [fleet.get(path).status_code for path in LOOKS] == [200] * 3
        assert fleet.post().status_code == 401


def add(fleet, instance, role="decode", **options):
    return fleet.post("/instances/add", {"type": role, "instance": instance}, **{"headers": KEY} | options)


def audited(fleet):
    """The lines of the audit log, after the logger's name."""
    return [line.split(" pdrelay.audit ")[1] for line in fleet.router.said.splitlines() if " pdrelay.audit " in line]


class Listener:
    """Counts connections, and keeps what they send."""

    def __init__(self, host, port):
        self.socket = socket.create_server((host, port))
        self.socket.settimeout(0.2)

    def connected(self):
        try:
            self.socket.accept()[0].close()
        except TimeoutError:
            return False
        return True


def test_nothing_is_sent_to_an_address_that_is_not_allowed(tmp_path):
    """Who has the admin key of a router must not read its metadata service, or be sent the engines' key there."""
    unused = socket.socket()  # bound and not listening: nobody else can get its port
    unused.bind(("127.0.0.1", 0))
    port = unused.getsockname()[1]
    listener = Listener("127.0.0.2", port)
    spellings = ["127.0.0.2", "[::ffff:127.0.0.2]", "[::ffff:7f00:2]"]
    odd = ["0x7f000002", "2130706434", "127.2", "127.0.0.0x2"]
    env = {"PDRELAY_DECODE_API_KEY": "engine-key"}
    args = ("--allowed-instances", "127.0.0.1/32", "10.0.0.0/8")
    with running(tmp_path, *args, env=env) as fleet, unused, closing(listener.socket):
        refused = [add(fleet, f"{host}:{port}") for host in (*spellings, "169.254.169.254", "8.8.8.8")]
        unread = [add(fleet, f"{host}:{port}") for host in odd]
        by_name = add(fleet, f"localhost:{port}")
        assert not listener.connected()

    assert {answer.status_code for answer in refused} == {403}
    assert "is not in allowed_instances: name its network or its name there" in refused[0].json()["detail"]
    assert {(answer.status_code, answer.json()["detail"]) for answer in unread} == {(400, "Invalid instance address.")}
    assert by_name.status_code == 400  # it leads to 127.0.0.1, where nobody listens at this port


def test_an_engine_that_is_added_sees_a_key_only_if_it_wants_one_and_never_the_operators(tmp_path):
    """The check of its models goes to whatever was named; the key of the pool follows with the first probe."""
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["path"], dict(scope["headers"]).get(b"authorization")))
        status = 200 if b"authorization" in dict(scope["headers"]) else 401
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": b'{"data": [{"id": "sim"}]}' if status == 200 else b"{}"})

    env = {"PDRELAY_DECODE_API_KEY": "engine-key"}
    with running(tmp_path, env=env) as fleet, serving(app, lifespan="off") as engine:
        answer = add(fleet, engine, headers=KEY | bearer("operator's own"))

    assert answer.status_code == 200
    assert seen[:3] == [("/health", None), ("/v1/models", None), ("/v1/models", b"Bearer engine-key")]
    assert b"Bearer operator's own" not in {shown for _, shown in seen}


def test_each_action_of_an_operator_leaves_one_line_in_the_audit_log(tmp_path):
    """Who, from where, what, and what became of it: also of what was refused, and of who had no key."""
    with running(tmp_path, x=1, y=2) as fleet:
        port = fleet.at["d1"]
        add(fleet, port)
        add(fleet, port)
        add(fleet, "169.254.169.254:80")
        add(fleet, "two\nlines:80")
        fleet.post("/instances/drain", {"id": "decode-1"}, headers=KEY)
        fleet.post("/instances/drain", {"id": "decode-9"}, headers=KEY)
        fleet.post("/instances/remove", {"id": "decode-1"}, headers=KEY)
        fleet.get("/instances", headers=KEY)
        wrong = fleet.post("/instances/remove", {"id": "decode-0"}, headers={"X-Api-Key": "sesam"})
        missing = fleet.get("/instances")
        numbers = fleet.get("/metrics").text
        lines = audited(fleet)

    who = f"key=sha256:{hashlib.sha256(KEY['X-Api-Key'].encode()).hexdigest()[:8]} client=127.0.0.1"
    bad = "169.254.169.254"
    assert lines == [
        f"action=add outcome=ok {who} target='decode {port}'",
        f"action=add outcome=refused {who} target='decode {port}' why='Instance already exists.'",
        f"action=add outcome=refused {who} target='decode {bad}:80' why='Instance address not allowed: {bad} is not in "
        "allowed_instances: name its network or its name there.'",
        f"action=add outcome=refused {who} target='decode two\\nlines:80' why='Invalid instance address.'",
        f"action=drain outcome=ok {who} target='decode-1'",
        f"action=drain outcome=refused {who} target='decode-9' "
        + "why=\"there is no instance 'decode-9': `pdrelay instances list` shows those there are\"",
        f"action=remove outcome=ok {who} target='decode-1'",
        "action=remove outcome=unauthenticated key=- client=127.0.0.1 why='a wrong X-Api-Key'",
        "action=list outcome=unauthenticated key=- client=127.0.0.1 why='no X-Api-Key'",
    ]
    assert (wrong.status_code, missing.status_code) == (401, 401)
    assert wrong.headers["www-authenticate"] == "X-Api-Key"
    for action, outcome, count in (("add", "ok", 1), ("add", "refused", 3), ("list", "ok", 1), ("remove", "ok", 1)):
        assert f'pdrelay_admin_actions_total{{action="{action}",outcome="{outcome}"}} {count}.0' in numbers
    assert 'pdrelay_admin_actions_total{action="remove",outcome="unauthenticated"} 1.0' in numbers


def test_who_guesses_keys_is_counted_and_does_not_fill_the_log(tmp_path):
    """A line for each try would be a way to fill a disk."""
    with running(tmp_path) as fleet, httpx.Client(timeout=30) as client:
        url = fleet.router.url + "/instances"
        tries = {client.get(url, headers={"X-Api-Key": f"guess-{number}"}).status_code for number in range(200)}
        numbers = fleet.get("/metrics").text
        lines = audited(fleet)

    assert tries == {401}
    assert 10 <= len(lines) < 100
    assert 'pdrelay_admin_actions_total{action="list",outcome="unauthenticated"} 200.0' in numbers


def test_an_engine_that_names_no_reachable_host_is_named_by_the_router(tmp_path):
    """It is said once for each engine, counted each time, and the requests get their KV cache."""
    engines = sims()
    prefill = Saying(engines["p0"], b"192.0.2.1", b"0.0.0.0")
    with ExitStack() as stack:
        p, d = stack.enter_context(serving(prefill)), stack.enter_context(serving(engines["d0"]))
        args = ("--prefill", p, "--decode", d)
        (router,) = stack.enter_context(router_processes(tmp_path, 1, *args))
        answers = [httpx.post(router.url + PATH, json=BODY, timeout=30) for _ in range(3)]
        numbers = httpx.get(router.url + "/metrics", timeout=30).text
        told = [json.loads(e.body)["kv_transfer_params"] for e in engines["d0"].log if e.path == PATH]
        said = router.said

    assert {answer.status_code for answer in answers} <= {200, 400}  # the simulated engine sees that they were changed
    assert {params["remote_host"] for params in told} == {"127.0.0.1"}
    assert said.count("prefill-0 names '0.0.0.0' as the host of its KV cache") == 1
    assert 'pdrelay_prefill_hosts_replaced_total{instance="prefill-0"} 3.0' in numbers


class Saying:
    """An application that writes something else in its answers; their lengths change, so they are sent in chunks."""

    def __init__(self, app, old, new):
        self.app = app
        self.old = old
        self.new = new

    async def __call__(self, scope, receive, send):
        async def changing(message):
            if message["type"] == "http.response.start":
                message["headers"] = [one for one in message["headers"] if one[0] != b"content-length"]
            elif message["type"] == "http.response.body":
                message["body"] = message.get("body", b"").replace(self.old, self.new)
            await send(message)

        await self.app(scope, receive, changing)
