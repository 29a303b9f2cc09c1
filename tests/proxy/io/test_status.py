"""The numbers of the status page."""

import json

import msgspec

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.status import Status
from pdrelay_proxy.settings import Settings
from support.steps import work_of_steps


def test_the_page_gets_numbers_and_ids_and_no_address():
    """Everything it shows comes from here, and anybody may ask."""
    now = [1000.0]
    registry = Registry()
    p = registry.add(Role.PREFILL, Address("http", "10.1.2.3", 8100))
    d = registry.add(Role.DECODE, Address("http", "secret-host", 8200))
    telemetry = Telemetry(Counters(frozenset({"/v1/completions"})), lambda: now[0])
    queue = Admission(Settings(max_concurrency=1, max_queue=3, max_queue_wait_s=9.0))
    status = Status(telemetry, registry, queue, lambda: now[0])
    for _ in range(2):
        queue.arrive("k", 0, 1, now=now[0])
    now[0] += 2
    telemetry.legs_over(p, [2.0], [2.0], now[0])
    telemetry.handed_over(0.0)
    telemetry.leg_failed(d, 0.0, Failure.UNREACHABLE, RequestId("r"), now[0])
    telemetry.count_legs_of(lambda: [d.id])
    record = RequestRecord(RequestId("r"), "/v1/completions")
    record.ttft_s = 2.25
    record.over(200, 2.5)
    telemetry.request_over(record)
    now[0] += 3
    text = msgspec.json.encode(finish(status.in_steps())).decode()

    said = json.loads(text)
    assert said["uptime_s"] == 5
    assert said["last_minute"] == {"requests_per_s": 1 / 60, "failed": 0, "ttft_s": 2.25, "gap_s": 0.0}
    common = {"state": "starting", "why": "added", "legs_per_s": 1 / 60}
    assert said["instances"] == [
        common | {"id": "prefill-0", "role": "prefill", "in_flight": 0, "failed": 0, "answer_s": 2.0},
        common | {"id": "decode-0", "role": "decode", "in_flight": 1, "failed": 1, "answer_s": None},
    ]
    assert said["queue"] == {"waiting": 1, "admitted": 1, "refused": 0}
    assert said["failures"] == [
        {"ago_s": 3.0, "request": "r", "where": "decode-0", "reason": "a leg did not reach the engine"}
    ]
    assert {len(line) for line in said["series"].values() if isinstance(line, list)} == {60}
    assert not any(secret in text for secret in ("10.1.2.3", "secret-host", "8100"))


def test_no_step_grows_with_the_fleet():
    """The page asks every other second: the numbers of 2,000 engines held the event loop for 0.6 s."""
    registry = Registry()
    telemetry = Telemetry(Counters(frozenset()), lambda: 7.0)
    for number in range(1000):
        instance = registry.add(Role.DECODE, Address("http", f"h{number}", 80))
        telemetry.legs_over(instance, [1.0], [1.0], 7.0)
    status = Status(telemetry, registry, Admission(Settings()), lambda: 7.0)
    work = work_of_steps(status.in_steps())

    assert len(work) > 150
    assert sorted(work)[-10] <= 1_500  # but for those that go through the whole fleet at once: names, groups
    assert len(finish(status.in_steps()).instances) == 1000


def test_a_router_that_has_seen_nothing_says_so():
    """Nulls, where there is nothing to take a mean of."""
    telemetry = Telemetry(Counters(frozenset()), lambda: 7.0)
    status = Status(telemetry, Registry(), Admission(Settings()), lambda: 7.0)

    said = msgspec.to_builtins(finish(status.in_steps()))
    assert said["instances"] == said["failures"] == []
    assert said["queue"] == {"waiting": 0, "admitted": 0, "refused": 0}
    assert said["last_minute"] == {"requests_per_s": 0.0, "failed": 0, "ttft_s": None, "gap_s": None}
    assert set(said["series"]["ttft_mean_s"]) == {None}
