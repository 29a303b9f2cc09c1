"""What Prometheus gets."""

import random
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.admission.admission import Admission
from xpyd_proxy.core.admission.limits import Limits
from xpyd_proxy.core.fleet.instance_states import Roll
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.journey import Journey, Outcome, Visit
from xpyd_proxy.core.measures import Measures
from xpyd_proxy.core.model import Api, InstanceId, Push, RequestId, Role, Solo
from xpyd_proxy.core.protocol.engine_errors import Failure
from xpyd_proxy.io.metrics import Metrics
from xpyd_proxy.io.sight import Sight


class World:
    """A registry with so many engines, and the metrics of it."""

    def __init__(self, x=1, y=1, queue=None):
        self.now = 0.0
        self.registry = Registry()
        self.prefill = [self.registry.add(Role.PREFILL, Address("http", "h", port)) for port in range(1, x + 1)]
        self.decode = [self.registry.add(Role.DECODE, Address("http", "h", port)) for port in range(1, y + 1)]
        self.sight = Sight(Measures(frozenset(Api)), lambda: self.now)
        self.metrics = Metrics(self.sight, Roll(self.registry), queue)

    def scrape(self, accept=""):
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.metrics.exposition(accept)[0].decode())
            for sample in family.samples
            if sample.name.startswith("xpyd_")
        }


def test_a_leg_shows_while_it_is_open_and_counts_when_it_is_over():
    """Numbers, read at scrape time."""
    world = World()
    (p,), (d,), r = world.prefill, world.decode, RequestId("r")
    world.sight.began(p, r)
    world.now = 0.2
    world.sight.answered(p, r, 0.2)
    open_legs = world.scrape()
    world.sight.ended(p, r, None)
    world.now = 0.203
    world.sight.began(d, r)
    world.sight.ended(d, r, Failure.BROKEN)
    over = world.scrape()

    assert open_legs["xpyd_legs_in_flight", "prefill", "prefill-0"] == 1
    assert over["xpyd_legs_in_flight", "prefill", "prefill-0"] == 0
    assert over["xpyd_legs_total", "ok", "prefill", "prefill-0"] == 1
    assert over["xpyd_legs_total", "broken", "decode", "decode-0"] == 1
    assert over["xpyd_leg_answer_seconds_bucket", "0.1", "prefill", "prefill-0"] == 0
    assert over["xpyd_leg_answer_seconds_bucket", "0.25", "prefill", "prefill-0"] == 1
    assert over["xpyd_leg_answer_seconds_sum", "prefill", "prefill-0"] == 0.2
    assert over["xpyd_handoff_gap_seconds_bucket", "0.0025"] == 0
    assert over["xpyd_handoff_gap_seconds_bucket", "0.005"] == 1
    assert over["xpyd_handoff_gap_seconds_count",] == 1


def test_states_are_one_of_a_known_list():
    """An alert on `state="broken"` needs the series before there is a broken one."""
    world = World()
    life = world.registry.member(InstanceId("decode-0")).life
    life.seen(now=0.0)
    for _ in range(2):
        life.missed("does not answer", now=1.0)
    seen = world.scrape()

    assert seen["xpyd_instance_state", "broken", "decode", "decode-0"] == 1
    assert seen["xpyd_instance_state", "decode", "decode-0", "joining"] == 0
    assert seen["xpyd_instance_state", "broken", "prefill", "prefill-0"] == 0


def test_the_queue_and_its_refusals_show():
    """Overload ends in refusals, and somebody must see them."""
    admission = Admission(Limits(concurrency=1, queue=1, wait_s=9.0))
    for _ in range(4):
        admission.arrive("key", 0, 10, now=0.0)
    seen = World(queue=admission).scrape()

    assert (seen["xpyd_queue_waiting",], seen["xpyd_requests_admitted",]) == (1, 1)
    assert seen["xpyd_requests_refused_total", "max_queue"] == 2


def test_releases_show():
    """Blocks that could not be freed stay pinned for a lease."""
    world = World()
    for freed in (True, False, False):
        world.sight.released(world.prefill[0], freed=freed)
    seen = world.scrape()

    assert seen["xpyd_releases_total", "freed", "prefill-0"] == 1
    assert seen["xpyd_releases_total", "failed", "prefill-0"] == 2


def test_two_routers_in_one_process_do_not_share_a_number():
    """Nothing is registered globally."""
    one, other = World(), World()
    one.sight.released(one.prefill[0], freed=True)

    assert not any(name == "xpyd_releases_total" for name, *_ in other.scrape())


def test_an_instance_that_was_removed_is_not_in_the_next_scrape():
    """Its legs may go on, and are nobody's."""
    world = World(1, 2)
    for instance in world.decode:
        world.sight.began(instance, RequestId("r"))
        world.sight.ended(instance, RequestId("r"), None)
    world.registry.remove(world.decode[1].id, now=0.0)

    assert {key[2] for key in world.scrape() if key[0] == "xpyd_legs_total"} == {"decode-0"}


def test_both_formats_of_prometheus_are_spoken():
    """The scraper chooses."""
    world = World()
    text, kind = world.metrics.exposition("text/plain")
    openmetrics, other_kind = world.metrics.exposition("application/openmetrics-text; version=1.0.0")

    assert kind.startswith("text/plain; version=")
    assert other_kind.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")
    assert b"process_resident_memory_bytes" in text


def test_ten_thousand_odd_requests_do_not_add_a_single_label():
    """What clients send must not make the metrics grow."""
    world, dice = World(3, 3), random.Random(1)
    sizes = []
    for turn in range(10_000):
        journey = Journey(RequestId(f"xpyd-{turn}"), solo=dice.choice([None, *Solo]), push=dice.choice([None, *Push]))
        p, d = dice.choice(world.prefill), dice.choice(world.decode)
        journey.prefill, journey.decode = dice.choice([None, Visit(p.id)]), Visit(d.id)
        journey.set_aside(Role.DECODE, dice.choice([*Failure, f"odd {turn}"]))
        journey.fault = dice.choice([None, f"odd {turn}"])
        path = dice.choice([*Api, f"/v1/{turn}", f'/v1/"\n{turn}'])
        outcome = Outcome(path, dice.choice([200, 400, 404, 499, 500, 502, 503]), dice.random(), dice.random())
        for instance in (p, d):
            world.sight.began(instance, journey.request_id)
            world.sight.answered(instance, journey.request_id, dice.random())
            world.sight.ended(instance, journey.request_id, dice.choice([None, *Failure]))
        world.sight.finished(journey, outcome)
        if turn in (4999, 9999):
            sizes.append(len(world.scrape()))

    assert sizes[0] == sizes[1] < 1000
    names = Counter(key[0] for key in world.scrape())
    assert names["xpyd_requests_total"] == (len(Api) + 1) * 5
