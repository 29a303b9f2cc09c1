"""Both ends of an examination over the in-memory fabric, in virtual time."""

import itertools

import pytest

from pdrelay_connector.core.doctor.diagnoses import diagnose
from pdrelay_connector.core.doctor.examination import ClockProbe, DialBack, EndFacts, Measure, Measurement, unwrap, wrap
from pdrelay_connector.core.doctor.examiner import Examiner, Plan
from pdrelay_connector.core.doctor.pair_facts import PairFacts
from pdrelay_connector.core.doctor.respondent import LONGEST_VISIT, RESPONDENT, Respondent
from pdrelay_connector.core.ids import Address
from pdrelay_connector.core.messages import PROTOCOL, DropLeases, Examination, RankMemory, Refusal, Welcome
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.errors import ProtocolViolation
from support.engines import FINGERPRINT, changed, rank_info
from support.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryNetwork, InMemoryTransferAgent

THERE, HERE = Address("p0", 5690), Address("d0", 40000)
BLOCKS = 13
BACK = DialBack(*HERE, "pdrelay-doctor-d0")
PLAN = Plan(2 * BLOCK_BYTES, seconds=0.5, timeout=5.0, back=BACK)


class End:
    """A link, an agent and memory."""

    def __init__(self, fabric, name):
        self.link, self.agent = InMemoryLink(fabric, name), InMemoryTransferAgent(fabric, name)
        self.info = rank_info(name)
        region = changed(self.info.regions[0], count=1, width=BLOCKS * BLOCK_BYTES)
        self.info = changed(self.info, regions=(region,))
        fabric.memories[name] = [name.encode()] * BLOCKS


class Pair:
    """An examiner and a respondent. Each turn takes 10 ms, and the respondent's clock is ``ahead`` by some seconds."""

    def __init__(self, *, plan=PLAN, ahead=0.0, welcome=FINGERPRINT, here=None):
        self.fabric = InMemoryNetwork()
        self.there, self.here = End(self.fabric, "p0"), End(self.fabric, "d0")
        self.ahead = ahead
        self.now = 1000.0
        self.news = []
        facts = EndFacts("p0", machine="m1")
        self.respondent = Respondent(
            self.there.link,
            self.there.agent,
            self.there.info,
            facts,
            transports=lambda: ("rc/mlx5_0:1",),
            say=self.news.append,
        )
        self.fabric.listen(THERE, self.there.link, Welcome(PROTOCOL, RESPONDENT, welcome, (self.there.info,)))
        self.fabric.listen(HERE, self.here.link, Welcome(PROTOCOL, "pdrelay-doctor-d0", welcome, ()))
        pair = PairFacts(address=str(THERE), here=here or EndFacts("d0", machine="m2"), model_here=FINGERPRINT)
        self.examiner = Examiner(
            self.here.link, self.here.agent, self.here.info, pair, plan, transports=lambda: ("rc/mlx5_1:1",)
        )

    def turn(self):
        self.now += 0.01
        self.fabric.deliver()
        for event in self.there.link.poll():
            self.respondent.on(event, now=self.now, wall=self.now + self.ahead)
        self.respondent.advance(now=self.now)
        self.fabric.deliver()
        for event in self.here.link.poll():
            self.examiner.on(event, now=self.now, wall=self.now)
        self.examiner.advance(now=self.now, wall=self.now)

    def run(self, *, until=lambda pair: pair.examiner.is_done, turns=20_000):
        self.examiner.start(THERE, now=self.now)
        for _ in range(turns):
            self.turn()
            if until(self):
                return self.examiner.facts
        raise AssertionError("it did not end")


def test_everything_is_measured_in_both_directions():
    """READ and WRITE of either end; then there is nothing to find."""
    pair = Pair()
    facts = pair.run()
    pair.turn()
    pair.turn()

    assert (facts.connect_failure, facts.lost, facts.back_failure) == ("", "", "")
    assert [(each.end, each.measurement.operation) for each in facts.measurements] == [
        *itertools.product(["here", "there"], ["READ", "WRITE"])
    ]
    for each in facts.measurements:
        measured = each.measurement
        assert (measured.failure, measured.block_bytes) == ("", PLAN.block_bytes)
        assert measured.bytes == measured.descriptors * PLAN.block_bytes
        assert measured.rate > 0
        assert measured.latency_seconds > 0
    assert (facts.transports_here, facts.transports_there) == (("rc/mlx5_1:1",), ("rc/mlx5_0:1",))
    assert diagnose(facts) == []
    assert pair.respondent.visits == 1


def test_a_skewed_clock_is_measured_by_the_middle_of_the_exchange():
    facts = Pair(ahead=400.0).run()

    assert abs(facts.clock.seconds - 400.0) <= facts.clock.error <= 0.02
    assert [each.name for each in diagnose(facts)] == ["clock"]


def test_another_fingerprint_is_found():
    facts = Pair(welcome=changed(FINGERPRINT, cache_dtype="fp8")).run()

    assert [each.name for each in diagnose(facts)] == ["fingerprint"]


def test_an_end_that_cannot_be_dialled_is_found():
    facts = Pair(plan=Plan(64, 0.1, 5.0, DialBack("elsewhere", 1, "x"))).run()

    assert "elsewhere" in facts.back_failure
    assert [each.name for each in diagnose(facts)] == ["blocked-port"]


@pytest.mark.parametrize("stuck", ["here", "there"])
def test_a_data_plane_that_moves_nothing_is_given_up_in_time(stuck):
    """As behind a firewall that drops: the other end's measurements are made all the same."""
    pair = Pair()
    getattr(pair, stuck).agent.stuck = True
    begun = pair.now
    facts = pair.run()

    (failed,) = [each for each in facts.measurements if each.measurement.failure]
    assert (failed.end, failed.measurement.operation) == (stuck, "READ")
    assert "did not end within 5 s" in failed.measurement.failure
    assert len(facts.measurements) == 3
    assert [each.name for each in diagnose(facts)] == ["data-plane"]
    assert pair.now - begun < 10


@pytest.mark.parametrize("end", ["here", "there"])
def test_memory_that_nixl_cannot_reach_is_found_and_the_other_way_measured(end):
    """UCX connects when it is given the other end's metadata: a closed port may fail there."""
    pair = Pair()
    unknown = changed(pair.there.info, agent=b"nobody")
    if end == "here":
        pair.fabric.listen(THERE, pair.there.link, Welcome(PROTOCOL, RESPONDENT, FINGERPRINT, (unknown,)))
    else:
        pair.examiner._own = unknown
    facts = pair.run()

    assert [each.measurement.failure for each in facts.measurements if each.end == end] == ["no memory of nobody"]
    assert len(facts.measurements) == 3
    assert [each.name for each in diagnose(facts)] == ["data-plane"]


def test_an_end_that_dies_in_the_middle_is_said():
    pair = Pair()
    pair.run(until=lambda pair: len(pair.examiner.facts.measurements) == 1)
    pair.fabric.kill(pair.there.link)
    for _ in range(2000):
        pair.turn()

    assert pair.examiner.is_done
    assert pair.examiner.facts.lost


def test_an_end_that_falls_silent_is_given_up():
    pair = Pair()
    pair.run(until=lambda pair: pair.examiner.facts.clock is not None)
    pair.fabric.cut(pair.there.link, is_cut=True)
    for _ in range(2000):
        pair.turn()

    assert pair.examiner.facts.lost == "the other end does not answer any more"


def test_a_second_partner_is_turned_away_and_the_first_goes_on():
    """One at a time: two measurements would share the link."""
    pair = Pair()
    pair.run(until=lambda pair: pair.examiner.facts.clock is not None)
    other = InMemoryLink(pair.fabric, "e0")
    other.connect(THERE, RESPONDENT)
    pair.turn()
    (met,) = other.poll()
    assert isinstance(met, PeerConnected)
    other.send(met.conn, wrap(ClockProbe()))
    pair.turn()
    pair.fabric.deliver()
    refused, lost = other.poll()
    while not pair.examiner.is_done:
        pair.turn()

    assert "examines another machine" in refused.message.reason
    assert isinstance(lost, ConnectionLost)
    assert pair.examiner.facts.lost == ""


@pytest.mark.parametrize(
    "messages",
    [
        [DropLeases(())],
        [Examination(b"garbage")],
        [wrap(Measure("READ", 64, 0.1, 1.0))],  # before its memory is known
        [RankMemory(rank_info("e0")), RankMemory(rank_info("e0"))],
        [RankMemory(changed(rank_info("e0"), regions=(changed(rank_info("e0").regions[0], base=(1 << 63) - 1),)))],
    ],
    ids=["an engine's", "garbage", "out of turn", "twice", "beyond all memory"],
)
def test_a_partner_that_breaks_the_rules_is_turned_away_and_the_next_one_served(messages):
    """It knows the secret, and may be of another version, or worse."""
    pair = Pair()
    other = InMemoryLink(pair.fabric, "e0")
    pair.fabric.memories["e0"] = [b""] * BLOCKS
    other.connect(THERE, RESPONDENT)
    pair.turn()
    (met,) = other.poll()
    for message in messages:
        other.send(met.conn, message)
    pair.turn()
    pair.fabric.deliver()
    assert pair.there.agent._peers == set(), "its memory is attached no more"
    (refused,) = (event.message for event in other.poll() if isinstance(event, MessageReceived))

    assert isinstance(refused, Refusal)
    assert pair.run().lost == ""


def test_a_partner_that_stays_too_long_is_turned_away():
    """Or a hung one would keep all others out."""
    pair = Pair()
    other = InMemoryLink(pair.fabric, "e0")
    other.connect(THERE, RESPONDENT)
    pair.turn()
    (met,) = other.poll()
    other.send(met.conn, wrap(ClockProbe()))
    pair.turn()
    pair.now += LONGEST_VISIT
    pair.turn()

    assert pair.run().lost == ""


def test_what_the_other_end_writes_cannot_steer_a_terminal():
    pair = Pair()
    pair.respondent._facts = changed(pair.respondent._facts, host="p0\x1b[2J")
    facts = pair.run()

    assert facts.there.host == "p0?[2J"


def test_garbage_is_a_violation():
    with pytest.raises(ProtocolViolation, match="pdrelay doctor"):
        unwrap(Examination(b"\xc1"))


def test_of_two_rounds_the_better_one_counts_and_a_failure_stays():
    """Other load on a machine only slows a measurement down."""
    pair = Pair()
    pair.run()
    slow, fast = (Measurement("READ", 64, bytes=64, seconds=seconds) for seconds in (2.0, 1.0))
    pair.examiner.facts.measurements.clear()
    for measurement, kept in [(slow, slow), (fast, fast), (slow, fast)]:
        pair.examiner._note("here", measurement)
        assert [each.measurement for each in pair.examiner.facts.measurements] == [kept]
    pair.examiner._note("here", changed(slow, failure="NIXL: gone"))

    assert [each.measurement.failure for each in pair.examiner.facts.measurements] == ["NIXL: gone"]
