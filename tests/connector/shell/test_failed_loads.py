"""A load that fails must not keep those that have not from being taken up: nothing would ever go on."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.request import RequestStatus

    from pdrelay_connector.shell.failed_loads import FailedLoads
    from support.cache_kinds import Pair
    from support.kinds_table import KINDS
    from support.scheduled_engine import TRANSFER

pytestmark = [
    pytest.mark.usefixtures("no_warnings"),
    pytest.mark.timeout(240),  # importing vLLM takes half a minute on a busy machine
]
LONG = [number % 3 for number in range(70)]


def load_while_the_first_fails(pair, requests):
    """Have a decode engine read some prompts; the first read fails, the others do not end yet."""
    reader = pair.d.movers[1]
    reader.stuck = True
    for number in range(requests):
        pair.ask(f"r{number}", [number, *LONG], 3, "pull")
        pair.run(1.0)
    first, *_ = reader._xfers
    reader.cancel(first)
    return reader


def test_loads_that_have_ended_are_taken_up_before_one_that_failed():
    """A prompt that is computed here takes more blocks of a window than one that is loaded; others have the rest."""
    kind = KINDS["windows of several sizes"]
    pair = Pair(kind.shape(blocks=200), kind.shape(blocks=80))
    reader = load_while_the_first_fails(pair, 3)
    reader.stuck = False
    pair.run(30.0)

    assert pair.counts["loads"] == 3
    assert len(pair.d.loaded) == 2
    assert pair.is_done


def test_a_more_important_load_does_not_wait_for_blocks_that_vllm_keeps_for_one_that_failed():
    """It is before that one, which has given way to another, and both together do not fit."""
    kind = KINDS["windows of several sizes"]
    pair = Pair(kind.shape(blocks=200), kind.shape(blocks=56))
    by_priority(pair.d)
    reader = load_while_the_first_fails(pair, 2)
    pair.ask("late", [2, 1, *LONG], 3, "pull", priority=-1)
    pair.run(1.0)
    reader.stuck = False
    pair.run(30.0)

    assert pair.is_done


def test_what_vllm_has_tried_to_take_up_in_vain_is_taken_up_before_a_load_that_failed():
    """It is loaded while no block is free for its last token; then a load before it fails, and needs even more."""
    shape = KINDS["full attention"].shape
    pair = Pair(shape(blocks=60), shape(blocks=40))
    reader = pair.d.movers[1]
    reader.stuck = reader.clinging = True
    pair.ask("fails", [0] * 45, 3, "pull")
    pair.run(1.0)
    pair.ask("loaded", [1] * 45, 3, "push")
    pair.round()
    pair.p.frozen = True
    pair.run(1.0)
    others = pair.d.pool.get_new_blocks(pair.d.pool.get_num_free_blocks())
    pair.p.frozen = False
    pair.run(TRANSFER + 5.0)
    pair.d.pool.free_blocks(others[:5])
    pair.run(5.0)

    assert pair.d.loaded == {"loaded"}
    assert pair.is_done
    pair.d.pool.free_blocks(others[5:])


def by_priority(engine):
    """Have vLLM schedule requests so."""
    scheduler = engine.scheduler
    scheduler.policy = SchedulingPolicy.PRIORITY
    for queue in ("waiting", "kv_holding_waiting", "skipped_waiting"):
        if hasattr(scheduler, queue):
            setattr(scheduler, queue, create_request_queue(scheduler.policy))


def test_blocks_in_the_prefix_cache_are_no_room_for_one_that_failed():
    """Two loads fail that hit the cache here. What they were read into is in quarantine; the second holds the rest."""
    shape = KINDS["full attention"].shape
    pair = Pair(shape(blocks=200), shape(blocks=1 + 2 * (17 + 5) + 2))
    prompts = [[number, *LONG[:67], *[number] * 20] for number in range(2)]
    for number, prompt in enumerate(prompts):
        pair.ask(f"warm{number}", prompt[:68], 1, "d")
        pair.run(1.0)
    reader = pair.d.movers[1]
    reader.stuck = reader.clinging = True
    for number, prompt in enumerate(prompts):
        pair.ask(f"r{number}", prompt, 3, "pull")
        pair.run(1.0)
    pair.run(TRANSFER + 30.0)

    assert (pair.counts["hits"], len(pair.d.decodes._quarantined)) == (2, 2)
    assert pair.is_done


def request(name, status):
    return SimpleNamespace(request_id=name, status=status, num_computed_tokens=0)


def failed_and_ended(status=RequestStatus.WAITING_FOR_REMOTE_KVS, failed=("a",)):
    """Two loads have ended, of "a" and "b"; that of "a" has failed, and vLLM has looked at it."""
    loads = FailedLoads()
    first, second = request("a", RequestStatus.WAITING), request("b", status)
    loads.ended(["a", "b"], failed, {"a": first, "b": second})
    return loads, first


@pytest.mark.parametrize("failed", ["a", "ab"])  # one that failed, too, holds its blocks until vLLM looks at it
def test_a_failed_load_that_gets_no_blocks_gives_way_each_second_time(failed):
    """If it always did, it would starve while loads end."""
    loads, first = failed_and_ended(failed=failed)

    assert [loads.gives_way(first) for _ in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("status", "failed"),
    [(RequestStatus.RUNNING, "a"), (RequestStatus.WAITING_FOR_REMOTE_KVS, "")],
    ids=["nothing behind it has blocks that are of no use", "its load has not failed"],
)
def test_nothing_else_gives_way(status, failed):
    """Whatever waits keeps its place."""
    loads, first = failed_and_ended(status, failed)

    assert not any(loads.gives_way(first) for _ in range(4))


def test_what_has_its_blocks_gives_way_no_more():
    """Preempted, it is in vLLM's other queue."""
    loads, first = failed_and_ended()
    loads.gives_way(first)
    loads.over("a")
    assert not any(loads.gives_way(first) for _ in range(2))
    loads.ended(["a"], {"a"}, {"a": first})
    loads.over("b")

    assert not any(loads.gives_way(first) for _ in range(2))
