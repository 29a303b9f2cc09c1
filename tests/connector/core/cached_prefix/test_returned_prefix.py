"""P asks D for what D's prefix cache has of a prompt: the stories, one by one."""

import pytest

from pdrelay_connector.core.cached_prefix.decode_scheduler import MAX_OPEN, Question
from pdrelay_connector.core.cached_prefix.prefill_scheduler import PAUSE, TRANSITIONS, SearchEvent, SearchState
from pdrelay_connector.core.ids import BlockId, EngineId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.messages import MAX_FOUND, PROTOCOL, Challenge, FindPrefix, PrefixFound, Reachable
from pdrelay_connector.core.ports import MessageReceived
from support.engines import BLOCK_SIZE, BLOCKS, LEASE
from support.returning import SEARCH, ReturningWorld, chain, pack

PROMPT = list(range(3 * BLOCK_SIZE))
NAMES = chain(FindPrefix(RequestId(""), pack(PROMPT), None))


@pytest.fixture(params=["pull", "push"])
def world(request):
    """Whoever moves prompts, what goes back is read."""
    world = ReturningWorld(request.param)
    world.compute(PROMPT)
    return world


def counted(engine, name):
    return engine.counters._counts[name]


def why(world):
    return [ended.reason for ended in world.d.freed]


def test_p_reads_what_d_has_computed(world):
    found = world.search([*PROMPT, 99])
    into = world.p.load("r", found, now=world.now)
    world.run()

    assert found.remote_num_tokens == len(PROMPT)
    assert world.p.bytes_of(into) == NAMES
    assert (why(world), world.d.pinned) == ([LeaseEvent.DONE], {})
    assert len(world.p.control.lease_renewer) == 0


def test_of_an_edited_history_only_the_beginning_is_found(world):
    found = world.search([*PROMPT[: 2 * BLOCK_SIZE], 77, *PROMPT[2 * BLOCK_SIZE + 1 :], 99])

    assert found.remote_num_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize(("tokens", "salt"), [([99, *PROMPT], None), ([*PROMPT, 99], "another tenant")])
def test_of_another_prompt_nothing_is_found(world, tokens, salt):
    assert world.search(tokens, salt) is None
    assert world.d.pinned == {}


def test_blocks_that_a_step_still_computes_are_not_named_before_its_end(world):
    """VLLM has them in its prefix cache already, and a read would bring what was there before."""
    world.d.schedule([*PROMPT, *range(50, 50 + BLOCK_SIZE)], None)

    assert world.search([*PROMPT, *range(50, 50 + BLOCK_SIZE), 99]) is None
    world.d.end_step()
    world.run()
    assert world.p.found[RequestId("r")].remote_num_tokens == len(PROMPT) + BLOCK_SIZE


def test_a_leased_block_is_not_evicted(world):
    world.search([*PROMPT, 99])

    assert not any(world.d.evict(name) for name in NAMES)
    world.p.control.lease_renewer.release(RequestId("r"), EngineId("d0"))
    world.run()
    assert all(world.d.evict(name) for name in NAMES)
    assert why(world) == [LeaseEvent.DROPPED]


def test_an_answer_that_comes_too_late_is_given_back(world):
    """The prefill computes its prompt meanwhile, as if it had not asked."""
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run(seconds=2 * SEARCH)
    assert world.p.found == {RequestId("r"): None}
    assert counted(world.p, "prefixes_unanswered") == 1

    world.d.look_up(now=world.now)
    world.run()

    assert world.d.pinned == {}
    assert why(world) == [LeaseEvent.DROPPED]


def test_an_engine_that_did_not_answer_is_left_alone_for_a_while(world):
    """One that hangs would cost each prefill the whole time."""
    world.d.frozen = True
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run(seconds=2 * SEARCH)
    world.p.search("s", [*PROMPT, 99], None, world.d, now=world.now)
    world.round()
    assert world.p.found == {RequestId("r"): None, RequestId("s"): None}

    world.d.frozen = False
    world.run(seconds=PAUSE)
    world.d.look_up(now=world.now)
    assert world.search([*PROMPT, 99], request="t") is not None


def test_a_request_that_has_ended_gives_back_what_is_found_for_it(world):
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    world.p.finder.cancel(RequestId("r"))
    world.d.look_up(now=world.now)
    world.run()

    assert (world.p.found, world.d.pinned) == ({}, {})


def test_an_engine_that_has_not_connected_is_not_asked(world):
    """Params name an engine and no address: who may write them cannot have P dial anywhere."""
    calls = len(world.network._wires)
    world.p.finder.find(FindPrefix(RequestId("r"), pack(PROMPT), None), EngineId("d7"), now=world.now)
    world.run()

    assert world.p.found == {RequestId("r"): None}
    assert counted(world.p, "prefixes_of_unknown_engines") == 1
    assert len(world.network._wires) == calls


def test_an_engine_speaks_for_itself_alone(world):
    """Who connects as d1 cannot say where d0 listens: the Hello proves the name."""
    other = world.start("d1", 5800)
    other.peers.ensure_connected(EngineId("p0"), world.p.address, now=world.now)
    world.run()

    assert world.p.finder._engines[EngineId("d0")].address == world.d.address
    assert world.p.finder._engines[EngineId("d1")].address == other.address


def test_the_lease_is_the_askers(world):
    """Another engine that has proven itself may neither renew nor end it."""
    world.search([*PROMPT, 99])
    other = world.start("p1", 5900)
    (lease,) = world.d.pinned
    found = world.p.found[RequestId("r")]
    other.control.lease_renewer.start_renewing(RequestId("x"), found, now=world.now)
    world.run()
    other.control.lease_renewer.release(RequestId("x"), EngineId("d0"))
    world.run()

    assert list(world.d.pinned) == [lease]
    assert counted(world.d, "foreign_messages") > 0


@pytest.mark.parametrize("when", ["before the look-up", "after the answer"])
def test_d_unpins_what_a_dead_p_has_asked_for(world, when):
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    if when == "after the answer":
        world.d.look_up(now=world.now)
        world.run()
    world.p.die()
    world.run()
    world.d.look_up(now=world.now)
    world.run()

    assert (world.d.pinned, len(world.d.lender)) == ({}, 0)


def test_a_lease_ends_with_the_connection_that_has_asked(world):
    """Even if P has not heard of it: D would keep the blocks for half a minute."""
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    world.p.frozen = True
    world.d.look_up(now=world.now)
    world.run()
    assert world.d.pinned

    world.network.lose()
    world.run()

    assert (world.d.pinned, why(world)) == ({}, [LeaseEvent.PEER_LOST])


def test_d_unpins_what_a_frozen_p_does_not_renew(world):
    world.search([*PROMPT, 99])
    world.p.frozen = True
    world.run(seconds=2 * LEASE, step=2.0)

    assert world.d.pinned == {}
    assert why(world) == [LeaseEvent.EXPIRED]


def test_a_restarted_d_is_not_read(world):
    """The lease died with the engine, and the one that answers there has another id."""
    found = world.search([*PROMPT, 99])
    world.d.die()
    world.d = world.start("d9", 5700)
    world.p.load("r", found, now=world.now)
    world.run(seconds=5.0)

    assert world.p.result("r").failure
    assert len(world.p.free) == BLOCKS


def test_d_that_dies_before_it_answers_costs_a_second_at_most(world):
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    world.d.die()
    world.run()

    assert world.p.found == {RequestId("r"): None}


def test_more_questions_than_the_engine_answers_are_refused(world):
    for number in range(MAX_OPEN + 1):
        world.p.search(f"r{number}", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    while world.d.lender._hashing:
        world.round()

    assert len(world.d.wanted) == MAX_OPEN
    assert world.p.found == {RequestId(f"r{MAX_OPEN}"): None}
    assert counted(world.d, "prefixes_refused") == 1


def test_a_long_prompt_keeps_nobody_from_being_heard(world):
    """D hashes it piece by piece, and renews the lease of another prompt meanwhile."""
    world.search([*PROMPT, 99])
    (lease,) = world.d.pinned
    before = world.d.leases.next_expiry()
    world.p.search("long", list(range(500 * BLOCK_SIZE)), None, world.d, now=world.now)
    world.run()
    world.now += LEASE / 2
    world.round()
    world.round()

    assert not world.d.wanted
    assert lease in world.d.pinned
    assert world.d.leases.next_expiry() > before
    assert world.d.control.advance(now=world.now) == world.now


def test_no_more_blocks_are_looked_up_than_an_answer_can_name(world):
    """Where a block is one token (MLA on ROCm), P closed the connection over a longer answer, and lost its leases."""
    world.d.lender._hash_blocks = lambda message: iter([[b"hash"] * (MAX_FOUND + 1)])
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    ((_, hashes),) = world.d.wanted

    assert len(hashes) == MAX_FOUND


def test_a_prompt_is_hashed_no_further_once_its_connection_has_closed(world):
    world.p.search("long", list(range(500 * BLOCK_SIZE)), None, world.d, now=world.now)
    world.run()
    world.p.die()
    world.run()

    assert not world.d.lender._hashing
    assert not world.d.wanted


def test_an_engine_that_breaks_the_protocol_is_forgotten_like_one_that_has_left(world):
    """We close its connection, and so no event says that it is gone: engines of ever other names would add up."""
    (known,) = world.p.finder._engines.values()
    world.p.control.on(MessageReceived(known.conn, Challenge(PROTOCOL, b"")), now=world.now)
    assert world.p.finder._engines == {}
    question = Question(known.conn, RequestId("r"))
    world.p.control.on(MessageReceived(known.conn, FindPrefix(question.request, pack(PROMPT), None)), now=world.now)
    assert len(world.p.lender) == 1
    world.p.control.on(MessageReceived(known.conn, Challenge(PROTOCOL, b"")), now=world.now)

    assert len(world.p.lender) == 0


@pytest.mark.parametrize(
    "answer",
    [
        PrefixFound(RequestId("r"), RequestId("lease"), BLOCK_SIZE, (BlockId(1),) * 9),
        PrefixFound(RequestId("r"), RequestId("lease"), 0, (BlockId(1),)),
        PrefixFound(RequestId("r"), RequestId(""), BLOCK_SIZE, (BlockId(1),)),
        PrefixFound(RequestId("r"), RequestId("lease"), BLOCK_SIZE, ()),
    ],
    ids=["more than was asked for", "no size", "no lease", "no blocks"],
)
def test_an_answer_that_cannot_be_right_finds_nothing(world, answer):
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    world.p.finder.answered(world.p.peers.get(EngineId("d0")).conn, answer)
    world.run()

    assert world.p.found == {RequestId("r"): None}


def test_an_answer_of_another_engine_finds_nothing(world):
    other = world.start("d1", 5800)
    world.p.peers.ensure_connected(EngineId("d1"), other.address, now=world.now)
    world.p.search("r", [*PROMPT, 99], None, world.d, now=world.now)
    world.run()
    answer = PrefixFound(RequestId("r"), RequestId("lease"), BLOCK_SIZE, (BlockId(1),))
    world.p.finder.answered(world.p.peers.get(EngineId("d1")).conn, answer)
    world.run()

    assert world.p.found == {}


def test_an_engine_that_lends_nothing_ignores_the_question():
    """It has not said that it does; whoever asks all the same waits in vain, and harms nothing."""
    world = ReturningWorld()
    world.d.control._prefix_lender = None
    world.p.search("r", PROMPT, None, world.d, now=world.now)
    world.run()

    assert counted(world.d, "unknown_transfer_messages") == 1


def test_where_d_listens_is_forgotten_with_its_connection(world):
    world.network.lose()
    world.run()

    assert world.p.finder._engines == {}
    world.meet()
    assert list(world.p.finder._engines) == [EngineId("d0")]


def test_an_engine_that_asks_nobody_takes_an_introduction():
    world = ReturningWorld()
    world.p.control._prefix_finder = None
    world.p.control._on_prefix_message(1, Reachable("10.0.0.1", 1))

    assert world.p.control.counters._counts["unknown_transfer_messages"] == 0


def test_the_table_of_a_search():
    assert {SearchState.CONNECTING, *(state for row in TRANSITIONS.values() for state in row.values())} == set(
        SearchState
    )
    assert {event for row in TRANSITIONS.values() for event in row} == set(SearchEvent)
