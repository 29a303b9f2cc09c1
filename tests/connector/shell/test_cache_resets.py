"""What was computed before a reset of the prefix cache is void: with other weights it would be a wrong text."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("the stories' kinds need vLLM 0.32", allow_module_level=True)
    from support.cache_kinds import Pair
    from support.kinds_table import KINDS

pytestmark = [
    pytest.mark.usefixtures("no_warnings"),
    pytest.mark.timeout(240),  # importing vLLM takes half a minute on a busy machine
]
PROMPT = [number % 3 for number in range(61)]
OTHERS = [[place % 2 for place in range(90)], [1 + place % 2 for place in range(90)]]
NAMES = ["full attention", "sliding window", "state of Mamba 2", "circular buffer"]


def pair_of(name):
    """A pair whose P has blocks for one long prompt and a half: what is freed is soon another's."""
    kind = KINDS[name]
    return Pair(kind.shape(blocks=56), kind.shape(blocks=200))


def overwrite(pair):
    """Have P compute other prompts, in the blocks that it has lent."""
    for number, prompt in enumerate(OTHERS):
        pair.ask(f"other{number}", prompt, 2, "p")
        pair.run(1.0)


def offered(pair, prompt=PROMPT):
    """Have P compute a prompt; return what it offers, with the lease that keeps it."""
    offers = []
    pair.asked["r"] = prompt, [], 3
    pair.awaited["p-r"] = offers.append
    pair.p.ask("p-r", prompt, most=1, params={"do_remote_decode": True, "transfer_id": "r", "transfer_mode": "pull"})
    pair.run(1.0)
    (offer,) = offers
    return offer


def check_was_not_loaded(pair):
    assert pair.is_done
    assert pair.d.loaded == set()
    assert pair.p.pool.get_num_free_blocks() == pair.p.shape.blocks - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_is_not_hindered_by_leases(name):
    """Else vLLM would keep all that is cached, and say so in a log line only."""
    pair = pair_of(name)
    offered(pair)
    assert len(pair.p.leases) == 1

    assert pair.p.scheduler.reset_prefix_cache()
    assert len(pair.p.leases) == 0
    assert pair.p.pool.get_num_free_blocks() == pair.p.shape.blocks - 1


@pytest.mark.parametrize("name", NAMES)
def test_an_offer_from_before_a_reset_is_not_taken_after_it(name):
    """Its blocks hold other prompts by then: the reader is told that there is no lease, and computes the prompt."""
    pair = pair_of(name)
    offer = offered(pair)
    assert pair.p.scheduler.reset_prefix_cache()
    overwrite(pair)
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(30.0)

    check_was_not_loaded(pair)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_across_a_reset_does_not_count(name):
    """The read has begun before it and ends after it; the fence throws it away."""
    pair = pair_of(name)
    offer = offered(pair)
    pair.d.movers[1].stuck = True
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(1.0)
    assert pair.d.movers[1]._xfers
    assert pair.p.scheduler.reset_prefix_cache()
    overwrite(pair)
    pair.d.movers[1].stuck = False
    pair.run(30.0)

    check_was_not_loaded(pair)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_across_a_reset_does_not_count(name):
    """A push that hangs, whose blocks are another's when it goes on."""
    pair = pair_of(name)
    pair.p.movers[0].stuck = True
    pair.ask("r", PROMPT, 3, "push")
    pair.run(2.0)
    assert pair.p.movers[0]._xfers
    assert pair.p.scheduler.reset_prefix_cache()
    overwrite(pair)
    pair.p.movers[0].stuck = False
    pair.run(30.0)

    check_was_not_loaded(pair)


def test_a_reset_in_the_middle_of_prompts_frees_their_windows():
    """They are preempted, and computed anew in other blocks."""
    pair = pair_of("sliding window")
    offers = []
    pair.awaited["p-r"] = offers.append
    pair.p.ask("p-r", PROMPT, most=9, params={"do_remote_decode": True})
    for _ in range(5):
        pair.round()
    assert len(pair.p.prefills._window_pins) == 1

    assert pair.p.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert pair.p.pool.get_num_free_blocks() == pair.p.shape.blocks - 1
