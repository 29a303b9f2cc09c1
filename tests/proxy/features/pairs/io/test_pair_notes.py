"""What requests and decode engines show of pairs reaches the matrix, the registry, the log and the counters."""

import logging

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.lone_engines import lone_engines_in_steps
from pdrelay_proxy.core.fleet.peer_metrics import PairFailure
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import ANY, EngineRole, LegOrder, RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.features.pairs.core.pair_matrix import PairMatrix
from pdrelay_proxy.features.pairs.core.peer_loads import PeerNews
from pdrelay_proxy.features.pairs.io.pair_notes import PairNotes
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.settings import KvTransferMode, Settings

PAIR = ("prefill-0", "decode-0")


class World:
    """Two prefill and two decode engines, and what chooses among them."""

    def __init__(self, **settings):
        self.now = 0.0
        registry = self.registry = Registry(Settings(**settings))
        for role in Role:
            for port in (1, 2):
                registry.add(role, Address("http", "h", port))
        for number in (0, 1):
            registry.learn(f"prefill-{number}", EngineCapabilities(engine_id=f"id{number}"))
        self.matrix = PairMatrix(16)
        self.notes = PairNotes(registry, self.matrix)
        pairs = PairSelector(registry, GroupChoice(RoundRobin()), pair_history=self.notes)
        self.fleet = LiveFleet(registry, pairs, PushCoordinates(at_once=True), lambda: self.now)

    def decode(self, number=0):
        return self.registry.known(Role.DECODE)[number]

    def fails(self, count=3, reason=PairFailure.HANDSHAKE, peer="id0", loaded=0):
        return self.notes.loads(self.decode(), [PeerNews(peer, loaded, {reason: count})], self.now)

    def pairs(self, count=12, ask=ANY):
        return [tuple(one.id for one in self.fleet.any_pair(ask)) for _ in range(count)]

    def over(self, prefill="prefill-0", decode="decode-0", *, status=200, ttft_s=0.3, push=None):
        legs = LegRecord(prefill, 200.0), LegRecord(decode, 250.0)
        record = RequestRecord(RequestId("r"), prefill=legs[0], decode=legs[1], push=push)
        record.status = status
        record.ttft_s = ttft_s
        record.began_at = self.now
        self.notes.ended([record])


@pytest.fixture
def world():
    return World()


def test_a_pair_whose_loads_fail_gets_no_requests_until_it_is_tried(world, caplog):
    """By one request, when its rest is over; the log says it once."""
    caplog.set_level(logging.INFO)
    world.fails()
    world.fails(1)
    assert PAIR not in world.pairs()
    world.now = 29.0
    assert PAIR not in world.pairs()
    world.now = 30.0
    assert world.pairs().count(PAIR) == 1
    world.fails(0, loaded=1)
    assert PAIR in world.pairs()

    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        (
            "WARNING",
            "prefill-0 and decode-0 cannot meet: 3 transfers in a row have failed (handshake), "
            "so the pair rests for 30 s",
        ),
        ("INFO", "prefill-0 and decode-0 have met again: the pair gets requests"),
    ]
    assert world.notes.health.failures == {("handshake",): 4}


def test_a_trial_that_fails_lengthens_the_rest(world):
    """And the next one waits."""
    world.fails()
    world.now = 30.0
    assert PAIR in world.pairs(1)
    world.fails(1)
    world.now = 89.0
    assert PAIR not in world.pairs()
    world.now = 90.0
    assert PAIR in world.pairs(1)


def test_a_load_that_succeeds_between_failures_is_evidence(world):
    """The two can meet."""
    world.fails(9, loaded=1)

    assert PAIR in world.pairs()
    assert world.notes.health.failures == {("handshake",): 9}


def test_a_trial_is_not_for_requests_of_another_model(world):
    """Nor for those that want a rank, or have failed before."""
    world.fails()
    for number in (0, 1):
        for role in Role:
            world.registry.learn(f"{role}-{number}", EngineCapabilities(models=frozenset({f"m{number}", "both"})))
    world.now = 30.0

    assert PAIR not in world.pairs(4, RoutingHints(model="m1"))
    world.now = 40.0
    usable = [world.fleet.usable(role) for role in Role]
    assert tuple(one.id for one in world.fleet.pair(*usable, RoutingHints(model="both").once_more())) != PAIR
    assert world.pairs(1, RoutingHints(model="both")) == [PAIR]


def test_engines_that_nobody_knows_are_named(world):
    """A prefill engine has another id since it was restarted, and must be asked for it."""
    assert world.fails(peer="other") == ["other"]
    assert PAIR in world.pairs()


def test_a_stream_that_moves_is_loaded_from_a_decode_engine(world):
    """The two are a pair like any other: the router does not ask all prefill engines who that was."""
    world.registry.learn("decode-1", EngineCapabilities(engine_id="id of decode-1"))
    lender = world.registry.member("decode-1").in_role(Role.PREFILL)

    assert world.registry.fitting(lender, [world.decode()])
    assert world.fails(peer="id of decode-1") == []
    assert not world.registry.fitting(lender, [world.decode()])


def test_ranks_are_known_by_their_numbers():
    """Each data-parallel rank of a prefill engine is a peer of its own."""
    registry = Registry(Settings())
    for rank in (0, 1):
        registry.add(Role.PREFILL, Address("http", "p", 1), rank=rank, facts=EngineCapabilities(engine_id="e"))
    decode = registry.add(Role.DECODE, Address("http", "d", 1))
    notes = PairNotes(registry, PairMatrix(4))
    notes.loads(decode, [PeerNews("e_dp1", 0, {PairFailure.TRANSFER: 3})], 0.0)

    assert registry.facts(decode).resting == {"prefill-1"}


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_engine_that_was_restarted_is_met_anew(world, who):
    """It may have another network, or the right secret."""
    world.fails()
    if who == "prefill":
        world.notes.is_another("prefill-0")
    else:
        world.notes.restarted(world.decode())

    assert PAIR in world.pairs()


def test_first_tokens_are_timed_from_handing_over(world):
    """With both legs sent at once, that is the prefill engine's answer."""
    world.over()
    world.over("prefill-1", push=LegOrder.CONCURRENT)
    world.over("prefill-1", "decode-1", ttft_s=None)

    times = {pair: facts.ttft_s for pair, facts in world.matrix.latest()}
    assert times == {
        PAIR: pytest.approx(0.25), ("prefill-1", "decode-0"): pytest.approx(0.05), ("prefill-1", "decode-1"): None,
    }  # fmt: skip


def test_what_clients_did_wrong_is_no_failure_of_a_pair(world):
    """And a request that failed has counted its legs."""
    world.notes.failed(PAIR, Failure.REFUSED, 1.0)
    world.over(status=500)
    assert len(world.matrix) == 0
    world.notes.failed(PAIR, Failure.TIMEOUT, 1.0)
    assert world.matrix.get(PAIR).failed == {"timeout": 1}


def blame(world, times=1):
    """A request fails on a pair, and is served by another one."""
    for _ in range(times):
        world.now += 1.0
        record = RequestRecord(RequestId("r"), prefill=LegRecord("prefill-0"), decode=LegRecord("decode-0"))
        record.prefill.name = record.decode.name = "r"
        record.set_aside(Role.DECODE, Failure.HTTP_5XX)
        record.start_over()
        world.notes.blamed(record, "decode-0", now=world.now)
        world.now += 1.0


def test_a_pair_whose_legs_alone_fail_rests_though_its_engine_tells_nothing(world):
    """A connector that is not ours does not say whose KV it cannot load."""
    for _ in range(3):
        blame(world)
        world.over("prefill-0", "decode-1")
        world.over("prefill-1", "decode-0")

    assert world.registry.facts(world.decode()).resting == {"prefill-0"}
    world.over()  # its trial is served
    assert PAIR in world.pairs()


def test_an_engine_that_fails_for_all_is_not_the_fault_of_a_pair(world):
    """The circuit breaker is for that."""
    for _ in range(9):
        blame(world)
        world.over("prefill-0", "decode-1")

    assert world.notes.health.resting == 0


def test_our_connectors_engines_say_it_themselves(world):
    """A failure would count twice."""
    world.registry.learn("decode-0", EngineCapabilities(connector="pdrelay"))
    blame(world, 9)

    assert not world.notes.health


def test_a_wrong_block_among_many_loads_has_the_pair_rest(world, caplog):
    """Most loads are not compared."""
    world.fails(1, reason=PairFailure.WRONG_KV, loaded=500)

    assert PAIR not in world.pairs()
    assert "KV of prefill-0 arrives wrong at decode-0 (wrong_kv), so the pair rests for 600 s" in caplog.text


@pytest.mark.parametrize(("name", "to"), [("prefill-0", EngineRole.DECODE), ("decode-0", EngineRole.PREFILL)])
def test_a_pair_of_which_one_has_turned_rests_no_longer(name, to):
    """It was true of the old role; and the decode engine that avoided it would be in a group of its own for ever."""
    registry = Registry(Settings())
    notes = PairNotes(registry, PairMatrix(4))
    for role in (*Role, *Role):
        instance = registry.add(role, Address("http", role.value, len(registry.members()) + 1))
        registry.learn(instance.id, EngineCapabilities(engine_id=instance.id))
    notes.loads(registry.member("decode-0").instance, [PeerNews("prefill-0", 0, {PairFailure.HANDSHAKE: 3})], 0.0)
    assert registry.member("decode-0").facts.resting == {"prefill-0"}
    registry.departures.change_role(name, to, now=0.0)
    registry.settle(patience_s=60, now=61.0)

    assert not notes.health.pairs()
    assert not registry.member("decode-0").facts.resting


@pytest.mark.parametrize("chosen", [KvTransferMode.PULL, KvTransferMode.PUSH])
def test_where_an_operator_has_chosen_nothing_is_tried_and_nothing_is_remembered(chosen):
    """``--kv-transfer-mode``: engines that can pull and push leave it to the router."""
    registry = Registry(Settings())
    notes = PairNotes(registry, PairMatrix(4))
    fleet = fleet_of(
        Settings(kv_transfer_mode=chosen),
        registry,
        PushCoordinates(at_once=True),
        lambda: 0.0,
        lambda n: 0,
        added=[RoutingParts(pair_history=notes)],
    )
    prefill, decode = (registry.add(role, Address("http", role.value, 1)) for role in Role)
    registry.learn(prefill.id, EngineCapabilities(mode=EngineMode.AUTO))

    assert {fleet.mode_of(prefill, decode).value for _ in range(20)} == {chosen.value}
    assert not len(notes.modes)


def test_the_reason_of_a_pair_that_rests_is_the_reason_of_its_engines():
    """Who looks why an engine shares no request with any other finds it there."""
    registry = Registry(Settings())
    notes = PairNotes(registry, PairMatrix(4))
    prefill, decode = (registry.add(role, Address("http", role.value, 1)) for role in Role)
    registry.learn(prefill.id, EngineCapabilities(engine_id="p"))
    notes.loads(decode, [PeerNews("p", 0, {PairFailure.TIMEOUT: 3})], 0.0)

    why = "decode-0 loads no KV of prefill-0: timeout"
    assert [each.text for each in finish(lone_engines_in_steps(registry, notes))] == [
        f"prefill-0: no decode engine shares a request with it: {why}",
        f"decode-0: no prefill engine shares a request with it: {why}",
    ]
    assert notes.resting() == [(("prefill-0", "decode-0"), "timeout")]
