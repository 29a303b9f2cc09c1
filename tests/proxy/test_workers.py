"""One router of several processes: whichever of them is asked, it is the same router."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrelay_proxy.cli import main
from pdrelay_proxy.testing.engine import FaultKind, SimulatedFault
from pdrelay_proxy.testing.rules import expected_text
from support.router_process import KEY, RouterProcess
from support.sim import fleet, serving, sims, until

PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not spread connections"),
]


class Crew(RouterProcess):
    """A router process with workers, and what they have written."""

    running = r"running on (https?://\S+) with"

    def __init__(self, folder, *args, count=2):
        self.count, self.clients = count, []
        super().__init__(folder / f"crew-{time.monotonic_ns()}.log", "--workers", str(count), *args)

    @property
    def pids(self):
        """Of all workers that have ever served."""
        return [int(pid) for pid in re.findall(r"worker \d+ is process (\d+)", self.said)]

    def worker(self, number):
        """Return a client that has one connection, to this worker."""
        for _ in range(200):
            client = httpx.Client(base_url=self.url, timeout=20, limits=httpx.Limits(max_connections=1))
            if client.get("/stats").json()["worker"] == number:
                self.clients.append(client)
                return client
            client.close()
        raise AssertionError(f"none of 200 connections reached worker {number}")

    def end(self):
        for client in self.clients:
            client.close()
        for _ in range(2):
            if self.child.poll() is None:
                self.terminate()
                time.sleep(0.05)
        try:
            self.child.wait(timeout=60)
        finally:
            self.child.kill()
            for pid in filter(is_alive, self.pids):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def crew_of(folder, *args, x=1, y=2, count=2, **options):
    """A crew before pretended engines; yields it, the engines and where they are."""
    with fleet(x, y, **options) as (engines, at, flags), ExitStack() as stack:
        crew = Crew(folder, *flags, *args, count=count)
        stack.callback(crew.end)
        yield crew.started(), engines, at


def is_alive(pid):
    """Tell whether a process still runs: one that has ended may wait for somebody who asks how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One crew for the tests that leave it as they found it: p0, d0 and d1 are in its settings."""
    folder = tmp_path_factory.mktemp("crew")
    config = folder / "pdrelay.toml"
    config.write_text("")
    flags = "--health-check-interval 0 --circuit-breaker-failures 3 --ejection-time 0.5"
    with crew_of(folder, "--config", str(config), *flags.split()) as (crew, engines, at):
        crew.config = config
        yield crew, engines, at


def post(client, **more):
    answer = client.post(PATH, json=BODY | more)
    assert answer.status_code == 200, answer.text
    return re.findall(r'"(decode-\d+)"', answer.headers["server-timing"])[0]


def rows(client):
    return {row["id"]: row for row in client.get("/instances", headers=KEY).json()["instances"]}


def order(client, verb, **body):
    answer = client.post(f"/instances/{verb}", headers=KEY, json=body)
    assert answer.status_code == 200, answer.text


@contextmanager
def guest(client):
    """One more decode engine, which tests add and remove; it is out behind a test, also behind one that fails."""
    with serving(sims(0, 1)["d0"]) as at:
        try:
            yield at
        finally:
            for name, row in rows(client).items():
                if row["address"] == at:
                    order(client, "remove", id=name)


def metrics(client):
    """Return what a worker shows of both, once both are in it: it waits half a second for the other one's numbers."""
    for _ in range(100):
        found = shown_metrics(client)
        if found["pdrelay_workers",] == 2:
            break
        time.sleep(0.05)
    return found


def shown_metrics(client):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def requests_of(found):
    return sum(value for key, value in found.items() if key[0] == "pdrelay_requests_total")


class Delays:
    """How long it took until the other worker knew: a second at most, but this machine may be busy with others' work.

    So the shortest of a test's delays is judged: a way that takes longer does so each time.
    """

    def __init__(self):
        self._seconds = []

    def wait(self, true):
        began = time.monotonic()
        until(true, seconds=20.0)
        self._seconds.append(time.monotonic() - began)

    def check(self):
        assert min(self._seconds) < 1.0


def test_an_engine_that_one_worker_is_told_of_is_used_by_the_other_within_a_second(shared):
    """Under the same id; and one that is taken out is used by nobody."""
    delays = Delays()
    crew, _, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    with guest(zero) as d2:
        for told, other in ((zero, one), (one, zero)):
            order(told, "add", type="decode", instance=d2)
            (added,) = rows(told).keys() - {"prefill-0", "decode-0", "decode-1"}
            delays.wait(lambda other=other, added=added: post(other) == added)
            assert rows(other)[added]["address"] == d2

            order(other, "remove", id=added)
            delays.wait(lambda told=told, added=added: added not in rows(told))
            assert added not in {post(told) for _ in range(6)}

    assert set(rows(zero)) == set(rows(one)) == {"prefill-0", "decode-0", "decode-1"}
    delays.check()


def test_an_engine_that_goes_and_comes_at_once_is_the_same_new_one_for_all(shared):
    """The other worker may not have seen it go."""
    delays = Delays()
    crew, _, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    with guest(zero) as d2:
        order(zero, "add", type="decode", instance=d2)
        until(lambda: len(rows(one)) == 4)
        for _ in range(3):
            (added,) = rows(zero).keys() - {"prefill-0", "decode-0", "decode-1"}
            order(zero, "remove", id=added)
            order(zero, "add", type="decode", instance=d2)
        delays.wait(lambda: set(rows(zero)) == set(rows(one)) and added not in rows(one))
        (added,) = rows(zero).keys() - {"prefill-0", "decode-0", "decode-1"}
        order(one, "remove", id=added)
        delays.wait(lambda: added not in rows(zero))
    delays.check()


def test_an_order_for_an_engine_that_went_hits_none_that_came_to_its_place(shared):
    """The other worker did not know of it yet, and took the entry of the new one out of the store."""
    crew, _, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    with guest(zero) as d2:
        order(zero, "add", type="decode", instance=d2)
        (added,) = rows(zero).keys() - {"prefill-0", "decode-0", "decode-1"}
        for _ in range(5):
            until(lambda added=added: added in rows(one))
            order(zero, "remove", id=added)
            order(zero, "add", type="decode", instance=d2)
            late = [one.post(f"/instances/{verb}", headers=KEY, json={"id": added}) for verb in ("drain", "remove")]
            assert [answer.status_code for answer in late] == [404, 404]
            (added,) = rows(zero).keys() - {"prefill-0", "decode-0", "decode-1"}
            assert rows(zero)[added]["state"] != "draining"
        order(zero, "remove", id=added)
        until(lambda: set(rows(zero)) == set(rows(one)) == {"prefill-0", "decode-0", "decode-1"})


def test_an_engine_that_one_worker_drains_is_drained_in_both(shared):
    """Also one that the settings name, of which no store knows; it is not called drained before both say so."""
    delays = Delays()
    crew, engines, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    engines["d0"]._token_s = engines["d1"]._token_s = 0.2  # so that the stream lasts
    with zero.stream("POST", PATH, json=BODY | {"max_tokens": 60, "stream": True}) as response:
        busy = re.findall(r'"(decode-\d+)"', response.headers["server-timing"])[0]
        order(one, "drain", id=busy)
        until(lambda: rows(one)[busy]["in_flight"] == 1)
        assert rows(one)[busy]["state"] == "draining"
        engines["d1" if busy == "decode-0" else "d0"]._token_s = 0.0
        assert busy not in {post(one) for _ in range(4)}
        engines["d0"]._token_s = engines["d1"]._token_s = 0.0
        assert response.read().endswith(b"data: [DONE]\n\n")
    delays.wait(lambda: all(rows(client)[busy]["state"] == "drained" for client in (zero, one)))
    assert busy not in {post(zero) for _ in range(4)}

    order(zero, "undrain", id=busy)
    delays.wait(lambda: rows(one)[busy]["state"] in ("starting", "healthy"))
    assert {post(one) for _ in range(4)} == {"decode-0", "decode-1"}
    delays.check()


def test_round_robin_is_fair_over_both_workers(shared):
    """Within one for each worker, and they do not both begin with the first engine."""
    crew, _, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    seen = Counter(post(client) for _ in range(7) for client in (zero, one))

    assert sum(seen.values()) == 14
    assert abs(seen["decode-0"] - seen["decode-1"]) <= 2


def test_metrics_and_status_are_those_of_all_workers_whoever_is_asked(shared):
    """What clients have counted is what operators see, in each answer."""
    crew, _, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    before = metrics(zero)
    for client, times in ((zero, 5), (one, 3)):
        for _ in range(times):
            post(client)
    until(lambda: requests_of(metrics(one)) == requests_of(before) + 8)
    after = {client: metrics(client) for client in (zero, one)}

    for found in after.values():
        assert requests_of(found) == requests_of(before) + 8
        legs = ("pdrelay_legs_total", "ok", "prefill", "prefill-0")
        assert found[legs] == before[legs] + 8
        count = ("pdrelay_handoff_gap_seconds_count",)
        assert found[count] == before[count] + 8
        assert found["pdrelay_workers",] == 2
        assert found["pdrelay_instance_state", "decode", "decode-0", "healthy"] == 1
        assert found["pdrelay_legs_in_flight", "prefill", "prefill-0"] == 0
    assert after[zero]["process_resident_memory_bytes",] > 1.5 * _resident(crew.pids[0])

    def stats():
        return [client.get("/stats").json() for client in (zero, one)]

    assert [(each["worker"], each["workers"]) for each in stats()] == [(0, 2), (1, 2)]
    until(lambda: len({json.dumps(each["last_minute"], sort_keys=True) for each in stats()}) == 1)


def _resident(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def test_an_engine_that_one_worker_breaks_is_broken_in_the_other_within_a_second(shared):
    """And it is well again for both when it has served its trial with one of them."""
    delays = Delays()
    crew, engines, _ = shared
    zero, one = crew.worker(0), crew.worker(1)
    engines["d1"].inject(SimulatedFault(FaultKind.STATUS, times=3))
    # It may be half open by the time of the look: this machine may be busy, and it is ejected for half a second.
    until(lambda: post(zero) and rows(zero)["decode-1"]["state"] in ("ejected", "half_open"))
    delays.wait(lambda: rows(one)["decode-1"]["state"] in ("ejected", "half_open"))
    assert rows(one)["decode-1"]["why"] == rows(zero)["decode-1"]["why"]

    until(lambda: post(one) and rows(one)["decode-1"]["state"] == "healthy")
    delays.wait(lambda: rows(zero)["decode-1"]["state"] == "healthy")
    delays.check()


def test_load_and_limits_are_those_of_the_router_and_not_of_each_worker(tmp_path):
    """A stream of one worker is load for the other; and of two places there are two, whoever hands them out."""
    delays = Delays()
    flags = ("--decode-policy", "least_loaded", "--max-concurrency", "2", "--max-queue", "0")
    body = BODY | {"max_tokens": 400, "stream": True}  # nothing waits for its end
    with crew_of(tmp_path, *flags, token_s=0.05) as (crew, _, _), ExitStack() as stack:
        zero, one = crew.worker(0), crew.worker(1)
        response = stack.enter_context(crew.worker(0).stream("POST", PATH, json=body))
        busy = re.findall(r'"(decode-\d+)"', response.headers["server-timing"])[0]
        delays.wait(lambda: rows(one)[busy]["in_flight"] == 1)
        assert busy not in {post(one) for _ in range(3)}

        stack.enter_context(crew.worker(1).stream("POST", PATH, json=body))
        assert [client.post(PATH, json=BODY).status_code for client in (zero, one)] == [503, 503]
        shown = metrics(zero)
        assert shown["pdrelay_legs_in_flight", "decode", busy] == 1
        assert shown["pdrelay_requests_running",] == 2
        assert shown["pdrelay_requests_refused_total", "max_queue"] == 2
        until(lambda: [client.get("/stats").json()["queue"]["refused"] for client in (zero, one)] == [2, 2])
        response.close()
        delays.wait(lambda: rows(one)[busy]["in_flight"] == 0)
    delays.check()


def test_a_worker_that_is_killed_is_replaced_and_the_others_fail_nothing(tmp_path):
    """Its successor knows the ids, what was drained and removed by hand, and goes on counting where it was."""
    with serving(sims(1, 0)["p0"]) as p1, crew_of(tmp_path, y=4) as (crew, _, _):
        zero, one = crew.worker(0), crew.worker(1)
        order(one, "add", type="prefill", instance=p1)
        order(one, "drain", id="decode-1")
        order(one, "remove", id="decode-2")
        for client in (zero, one, zero):
            post(client)
        until(lambda: requests_of(metrics(one)) == 3)
        time.sleep(1.2)  # what the last second has counted may be lost
        os.kill(crew.pids[0], signal.SIGKILL)
        until(lambda: post(one) and len(crew.pids) == 3, seconds=30)
        until(lambda: metrics(one)["pdrelay_workers",] == 2)
        served = requests_of(metrics(one))
        new = crew.worker(0)
        until(lambda: set(rows(new)) == set(rows(one)))

        assert "worker 0 has ended (killed by SIGKILL): another one starts in 0.2 s" in crew.said
        assert rows(new).keys() == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-3"}
        assert rows(new)["decode-1"]["state"] in ("draining", "drained")
        assert {row["address"] for row in rows(new).values()} == {row["address"] for row in rows(one).values()}
        assert served == requests_of(metrics(new)) > 3
        assert metrics(new)["pdrelay_worker_starts_total", "0"] == 2


@pytest.mark.slow  # an engine turns, which takes seconds
def test_all_workers_turn_an_engine_together(tmp_path):
    """While one of them has a request there all wait; a worker that is started later serves the new role at once."""
    with crew_of(tmp_path, "--health-check-interval", "0", kv_both=True) as (crew, engines, _):
        zero, one = crew.worker(0), crew.worker(1)
        engines["d0"].inject(SimulatedFault(FaultKind.STALL, after=1))
        busy = one.build_request("POST", PATH, json=BODY | {"stream": True})
        began = None
        while began != "decode-0":
            response = one.send(busy, stream=True)
            began = re.findall(r'"(decode-\d+)"', response.headers["server-timing"])[0]
            if began != "decode-0":
                response.read()
        other = crew.worker(1)
        order(zero, "turn", id="decode-0", to="prefill")
        until(lambda: rows(other)["decode-0"]["turns_to"] == "prefill")
        time.sleep(0.5)
        waiting = [rows(client)["decode-0"] for client in (zero, other)]
        engines["d0"].inject(None)
        response.close()
        until(lambda: {rows(client)["decode-0"]["role"] for client in (zero, other)} == {"prefill"})
        counted = {key: value for key, value in metrics(zero).items() if key[0] == "pdrelay_turns_total"}
        os.kill(crew.pids[0], signal.SIGKILL)
        until(lambda: post(other) and len(crew.pids) == 3, seconds=30)
        until(lambda: metrics(other)["pdrelay_workers",] == 2)
        new = crew.worker(0)
        until(lambda: set(rows(new)) == set(rows(other)))

        assert {(row["role"], row["turns_to"]) for row in waiting} == {("decode", "prefill")}
        assert counted == {("pdrelay_turns_total", "prefill", "turned"): 1}
        assert {name: row["role"] for name, row in rows(new).items()} == {
            "prefill-0": "prefill",
            "decode-0": "prefill",
            "decode-1": "decode",
        }
        order(new, "turn", id="decode-0", to="decode")
        until(lambda: {rows(client)["decode-0"]["role"] for client in (new, other)} == {"decode"}, seconds=60)


def test_workers_end_when_their_supervisor_is_killed(tmp_path):
    """And the last of them takes their folder along."""
    with crew_of(tmp_path) as (crew, _, _):
        folder = _folder_of(crew.pids[0])
        assert (folder / "ledger").exists()
        crew.child.kill()
        crew.child.wait()
        until(lambda: not any(map(is_alive, crew.pids)), seconds=20)

    assert "the supervisor has gone: this worker ends, too" in crew.said
    assert not folder.exists()


def _folder_of(pid):
    open_files = [one.readlink() for one in Path(f"/proc/{pid}/fd").iterdir()]
    return next(file for file in open_files if file.name == "ledger").parent


def test_sigterm_lets_the_streams_of_all_workers_finish(tmp_path):
    """Exit code 0, and nothing is left behind."""
    body = BODY | {"max_tokens": 20, "stream": True}
    with crew_of(tmp_path, token_s=0.05) as (crew, _, _), ExitStack() as stack:
        folder = _folder_of(crew.pids[0])
        opened = [crew.worker(number).stream("POST", PATH, json=body) for number in (0, 1)]
        answers = [stack.enter_context(one) for one in opened]
        for pid in (*crew.pids, crew.child.pid):  # as systemd does it; to the first one alone is the same
            os.kill(pid, signal.SIGTERM)
        texts = [_text(answer) for answer in answers]
        assert crew.child.wait(timeout=20) == 0
        assert not any(map(is_alive, crew.pids))

    assert texts == [expected_text(BODY | {"max_tokens": 20})] * 2
    assert not folder.exists()
    assert "Traceback" not in crew.said


def _text(response):
    events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_reload_reaches_all_workers(shared):
    """One SIGHUP to the process that was started."""
    crew, _, _ = shared
    crew.config.write_text("max_rat = 1")
    crew.signal(signal.SIGHUP)
    until(lambda: crew.said.count("max_rat is not a setting") == 2)
    crew.config.write_text("retries = 1")
    crew.signal(signal.SIGHUP)
    until(lambda: len(re.findall(r"the settings were read again\n", crew.said)) == 2)


@pytest.mark.slow  # six supervisors, which import the router
def test_what_is_wrong_is_said_once(tmp_path):
    """However many workers there are; the exit code is that of a usage error."""
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        port, nowhere = str(taken.getsockname()[1]), ("--host", "no.such.host.invalid")
        wrong = {
            ("--max-concurrency", "1"): "max_concurrency is 1, and there are 2 workers: write at least 2, or fewer",
            ("--decode", "a:1", "a:1"): "a:1 is already known as decode-0: name every engine once",
            ("--workers", "65"): "'65' is not a number of workers: write one from 1 to 64",
            ("--port", port): f"the router cannot listen at 127.0.0.1 port {port}: Address already in use",
            (*nowhere, "--allow-unauthenticated", "true"): "no.such.host.invalid is no address to listen at",
            nowhere: "host is no.such.host.invalid, so others could use the engines without a key",
        }
        started = {flags: Crew(tmp_path, *flags) for flags in wrong}
        for crew in started.values():
            stack.callback(crew.end)
        for flags, crew in started.items():
            assert crew.child.wait(timeout=60) == 2
            assert wrong[flags] in crew.said
            assert crew.said.count("\n") == 1


@pytest.mark.slow  # supervisors import the router
def test_each_worker_follows_the_caches_of_engines_and_learns_the_tokens_of_its_own_prompts(tmp_path):
    """With --kv-events auto. Of ids each knows what the other has sent, of texts once it has sent them, too."""
    policies = "--prefill-policy prefix --decode-policy prefix --kv-events auto --min-split-new-bytes 400"
    ids = {"model": "sim", "prompt": list(range(100, 500)), "max_tokens": 3}
    chat = {"model": "sim", "messages": [{"role": "user", "content": "a long question, " * 60}], "max_tokens": 3}
    with crew_of(tmp_path, *policies.split(), x=1, y=1, cache_blocks=300) as (crew, engines, _):
        zero, one = crew.worker(0), crew.worker(1)
        for worker in (zero, one):
            until(lambda worker=worker: _cached(worker, PATH, ids) == [0, 0])
        assert zero.post(PATH, json=ids).status_code == 200
        for worker in (zero, one):
            until(lambda worker=worker: _cached(worker, PATH, ids) == [384, 384])
        assert zero.post(CHAT, json=chat).status_code == 200
        until(lambda: len(_cached(zero, CHAT, chat)) == 2 and min(_cached(zero, CHAT, chat)) > 900)
        assert _cached(one, CHAT, chat) == []
        assert one.post(CHAT, json=chat).status_code == 200
        until(lambda: _cached(one, CHAT, chat) == _cached(zero, CHAT, chat))
        engines["d0"].cache.clear()
        for worker in (zero, one):
            until(lambda worker=worker: min(_cached(worker, CHAT, chat)) == 0)
        until(lambda: metrics(zero).get(("pdrelay_known_prompts_total", "learned")) == 2)
        until(lambda: metrics(zero).get(("pdrelay_kv_event_connections", "decode-0", "following")) == 2)


CHAT = "/v1/chat/completions"


def _cached(worker, path, body):
    """Return the tokens that engines are known to have."""
    answer = worker.post("/instances/explain", headers=KEY, json={"path": path, "body": body})
    assert answer.status_code == 200, answer.text
    return [*answer.json()["cached_tokens"].values()]


@pytest.mark.slow  # four workers start, and each is asked
def test_why_finds_a_request_of_any_worker(tmp_path, monkeypatch):
    """Each knows its own only, and nobody chooses whose connection it gets: the command asks again."""
    with crew_of(tmp_path, count=3) as (crew, *_):
        monkeypatch.setenv("ADMIN_API_KEY", KEY["X-Api-Key"])
        names = [crew.worker(number).post(PATH, json=BODY).headers["x-request-id"] for number in range(3)]
        codes = [main(["why", "--router", crew.url, name]) for name in names]

    assert codes == [0, 0, 0]
