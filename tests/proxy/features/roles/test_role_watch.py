"""Decisions on roles, from the engines' metrics to the log, the counters and the status page."""

import logging

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.features.roles.role_board import RoleBoard
from pdrelay_proxy.features.roles.role_controller import RoleController
from pdrelay_proxy.features.roles.role_watch import RoleWatch
from pdrelay_proxy.features.roles.settings import RolesMode
from pdrelay_proxy.io.probes.checks import ProbeFailed
from support.fluid_fleet import LIMITS, TARGETS, FluidFleet


class World:
    """A router that knows the engines of a fluid fleet by their names as hosts."""

    def __init__(self, prefill, decode, facts=None):
        self.fleet = FluidFleet(prefill, decode)
        self.registry = Registry()
        for name, role in self.fleet.roles.items():
            self.registry.add(role, Address("http", name, 80), facts=facts)
        self.silent = set()
        self.board = RoleBoard(RolesMode.DRY_RUN, 6, self.clock)
        self.watch = RoleWatch(
            self.registry, self.metrics, RoleController(TARGETS, LIMITS), self.board,
            queued=lambda: 0, every_s=1.0, clock=self.clock,
        )  # fmt: skip

    def clock(self):
        return self.fleet.now

    async def metrics(self, instance):
        if instance.id in self.silent:
            raise ProbeFailed("cannot be reached")
        return self.fleet.exposition(instance.address.host)

    async def run(self, prefill_busy, decode_busy, seconds):
        for _ in range(int(seconds / 10)):
            self.fleet.step(prefill_busy, decode_busy)
            await self.watch.decide()
        return self.board.latest

    def wanted(self):
        """How many engines of each role the metrics want."""
        (family,) = [one for one in self.board.families() if one.name == "pdrelay_wanted_engines"]
        return {one.labels["role"]: one.value for one in family.samples}


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(caplog):
    """In the log with its numbers, in the metrics and on the page; and it keeps to the limits it would have."""
    caplog.set_level(logging.INFO)
    world = World(8, 8)
    decision = await world.run(8.5, 2.0, 1800)
    page = world.board.status()
    lines = [record.getMessage() for record in caplog.records if record.name == "pdrelay.roles"]
    turns = [line for line in lines if "verdict=turn" in line]

    assert len(world.registry.known(Role.PREFILL)) == 8
    assert world.board.decisions["turn", "prefill"] == len(turns) == 6
    assert (decision.verdict, decision.changes_in_hour) == ("spent", 6)
    assert page.state.startswith("dry-run, spent, ")
    assert page.sentences[0] == decision.why
    assert page.sentences[1].startswith("6 of 6 turns in the last hour; the last one: decode-0 to prefill")
    assert world.wanted()["prefill"] == decision.wanted.prefill >= 11
    assert world.wanted()["decode"] == decision.wanted.decode <= 5
    assert [row[3] for row in page.rows] == [str(decision.wanted.prefill), str(decision.wanted.decode)]
    for fact in ("instance=decode-0", "to=prefill", "prefill_busy=8.", "decode_busy=", "itl_ms=", "queued_tokens="):
        assert fact in turns[0]
    assert "why='decode-0 to prefill: prefill lacks an engine: 8." in turns[0]


async def test_equal_decisions_are_one_line(caplog):
    """Every few seconds there is one: the log shows what changes."""
    caplog.set_level(logging.INFO)
    world = World(4, 4)
    await world.run(2.0, 2.0, 1200)
    verdicts = [record.facts["verdict"] for record in caplog.records if record.name == "pdrelay.roles"]

    assert verdicts == ["unknown", "balanced"]
    assert sum(world.board.decisions.values()) == 2


async def test_engines_that_do_not_answer_are_named_and_nothing_is_wanted():
    """A sum without them would be too small; an autoscaler that is told nothing keeps what there is."""
    world = World(4, 4)
    world.silent = {"decode-2"}
    decision = await world.run(2.0, 2.0, 300)

    assert decision.verdict == "unknown"
    assert "decode-2" in decision.why
    assert world.wanted() == {}


async def test_an_engine_that_drains_is_no_engine_of_its_role():
    """It gets nothing new: to count it would hide that the others are too few."""
    world = World(8, 8)
    await world.run(5.0, 5.0, 300)
    for number in range(4):
        world.registry.departures.drain(f"prefill-{number}", now=world.fleet.now)
    decision = await world.run(5.0, 5.0, 60)

    assert decision.engines.prefill == 4


async def test_an_engine_that_retires_before_it_has_turned_holds_up_nothing():
    """It is no longer listed, and its last stream may take hours: it will not turn, and others may."""
    world = World(8, 8)
    await world.run(8.5, 2.0, 60)
    world.registry.member("decode-7").load.enter("endless")
    world.registry.departures.change_role("decode-7", EngineRole.PREFILL, now=world.fleet.now)
    assert (await world.run(8.5, 2.0, 60)).verdict == "turning"

    world.registry.departures.retire("decode-7", now=world.fleet.now)
    before = world.board.decisions["turn", "prefill"]
    await world.run(8.5, 2.0, 600)

    assert world.registry.member("decode-7").turn is not None
    assert world.board.decisions["turn", "prefill"] > before


@pytest.mark.parametrize(
    ("models", "facts", "why"),
    [
        ({"prefill-0": {"a"}, "decode-0": {"b"}}, None, "engines serve 2 different sets of models"),
        ({}, EngineCapabilities(pairs_within="a"), "slice_pairing is require"),
    ],
)
async def test_engines_that_are_not_one_pool_are_left_alone(models, facts, why):
    """An engine that turned would be of no use to the requests that lack one."""
    world = World(4, 4, facts)
    for name, served in models.items():
        world.registry.learn(name, EngineCapabilities(models=frozenset(served), adapters=frozenset()))
    decision = await world.run(4.0, 1.0, 200)

    assert (decision.verdict, decision.wanted) == ("unknown", None)
    assert why in decision.why


async def test_an_engine_known_under_both_roles_is_not_counted_twice():
    """Its numbers are those of both."""
    world = World(2, 2)
    world.registry.add(Role.DECODE, Address("http", "e00", 80))
    decision = await world.run(1.0, 1.0, 100)

    assert decision.why == "an engine has both roles at the same time"


def test_the_page_has_nothing_before_the_first_look():
    """Zeros would be a lie."""
    assert World(1, 1).board.status() is None


async def test_a_json_log_has_the_numbers_as_fields(caplog):
    """For whoever counts decisions in the log."""
    caplog.set_level(logging.INFO)
    world = World(4, 4)
    await world.run(2.0, 2.0, 300)
    facts = [record.facts for record in caplog.records if record.name == "pdrelay.roles"][-1]

    assert facts["verdict"] == "balanced"
    assert facts["prefill_rate"] == pytest.approx(10_000, rel=0.3)
    assert {"decode_rate", "decode_batch", "full_kv_caches", "arriving_tokens_per_s"} <= facts.keys()
