"""What vLLM's own tests demand of a scheduler with its NIXL connector, of one with ours: docs/interop.md has the table.

They are ``test_remote_decode_lifecycle`` and ``test_remote_prefill_lifecycle`` of its ``tests/v1/kv_connector/unit``.
Here vLLM's scheduler has our whole connector, and both engines are there; each token is computed from KV that is
compared with what it must be.
"""

import logging
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("the stories' kinds need vLLM 0.32", allow_module_level=True)
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    from support.cache_kinds import Pair
    from support.kinds_table import KINDS

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
BLOCK = 4  # tokens
BLOCKS = 56  # of each engine, with block 0, which nothing uses
PROMPT = [number % 3 for number in range(10 * BLOCK + 2)]


@pytest.fixture
def pair():
    """A prefill and a decode engine."""
    logging.disable(logging.WARNING)  # leases that no one comes for are some
    shape = KINDS["full attention"].shape(BLOCK, blocks=BLOCKS)
    yield Pair(shape, shape)
    logging.disable(logging.NOTSET)


def used(engine):
    """How many blocks of an engine are not free."""
    return BLOCKS - 1 - engine.pool.get_num_free_blocks()


def offered(pair, prompt=PROMPT):
    """Have P compute a prompt that D will be asked for; return what it offers."""
    offers = []
    pair.asked["r"] = prompt, [], 3
    pair.awaited["p-r"] = offers.append
    pair.prefill("r", prompt, "pull")
    pair.run(1.0)
    (offer,) = offers
    return offer


def loading(pair, prompt=PROMPT):
    """Have D wait for KV that is under way; return its request."""
    pair.d.movers[1].stuck = True
    pair.d.ask("r", prompt, most=3, params=offered(pair, prompt))
    pair.run(1.0)
    return pair.d.scheduler.requests["r"]


def arrive(pair):
    """Let what is under way arrive."""
    pair.d.movers[1].stuck = False
    pair.run(5.0)


def check_is_at_rest(pair, *, loaded):
    assert pair.is_done
    assert pair.d.loaded == loaded
    assert [used(engine) for engine in (pair.p, pair.d)] == [0, 0]
    assert [len(engine.scheduler.requests) for engine in (pair.p, pair.d)] == [0, 0]


@pytest.mark.parametrize("tokens", [BLOCK // 2, 2 * BLOCK, 2 * BLOCK + 2])
def test_blocks_of_a_finished_prefill_are_kept_until_they_are_read(pair, tokens):
    """Also the last one, which is not full. The request itself is over: vLLM's connector would keep that, too."""
    offer = offered(pair, PROMPT[:tokens])
    (blocks,) = offer["remote_block_ids"]
    assert pair.p.scheduler.requests == {}
    assert len(blocks) == used(pair.p) == -(-tokens // BLOCK)

    pair.d.ask("r", PROMPT[:tokens], most=3, params=offer)
    pair.run(5.0)

    check_is_at_rest(pair, loaded={"r"})


def test_what_p_had_in_its_cache_is_offered_too(pair):
    """D may have none of it."""
    pair.ask("before", PROMPT[:-BLOCK], 3, "p")
    pair.run(1.0)
    offer = offered(pair)
    (blocks,) = offer["remote_block_ids"]
    assert len(blocks) == 11
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(5.0)

    check_is_at_rest(pair, loaded={"r"})


def test_a_prefill_that_is_aborted_when_it_is_over_is_kept(pair):
    """The client of P's leg is the router, which hangs up when it has the answer."""
    offer = offered(pair)
    pair.p.abort("p-r")
    pair.run(1.0)
    assert used(pair.p) == 11
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(5.0)

    check_is_at_rest(pair, loaded={"r"})


def test_a_request_waits_for_its_kv_with_blocks_that_no_other_finds(pair):
    """They hold nothing yet. Afterwards the full ones are in the prefix cache."""
    request = loading(pair)
    (blocks,) = pair.d.scheduler.kv_cache_manager.get_block_ids("r")
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(blocks) == 11
    assert [pair.d.pool.blocks[block].block_hash for block in blocks] == [None] * 11
    pair.ask("same", PROMPT, 3, "d")
    pair.run(1.0)
    assert pair.asked["same"][1]
    arrive(pair)

    check_is_at_rest(pair, loaded={"r"})


def test_others_are_computed_meanwhile(pair):
    """One that ran before, and one that comes with it."""
    pair.ask("before", [1, *PROMPT], 40, "d")
    pair.round()
    loading(pair)
    pair.ask("beside", [2, *PROMPT], 3, "d")
    pair.run(1.0)
    assert len(pair.asked["beside"][1]) == 3
    arrive(pair)
    pair.run(20.0)

    check_is_at_rest(pair, loaded={"r"})


def test_a_prompt_of_full_blocks_needs_no_other_block_for_its_last_token(pair):
    """That token alone is computed here, in the block that has come for it."""
    request = loading(pair, PROMPT[: 3 * BLOCK])
    (blocks,) = pair.d.scheduler.kv_cache_manager.get_block_ids("r")
    assert (len(blocks), request.num_computed_tokens) == (3, 3 * BLOCK - 1)
    arrive(pair)

    check_is_at_rest(pair, loaded={"r"})


def test_a_client_that_leaves_during_the_load_leaves_nothing(pair):
    """D's blocks are kept until nothing can be written into them any more."""
    loading(pair)
    pair.leave("r")
    pair.run(1.0)
    assert used(pair.d) == 11
    arrive(pair)
    pair.run(40.0)

    assert [used(engine) for engine in (pair.p, pair.d)] == [0, 0]
    assert pair.d.scheduler.requests == {}


def test_a_request_that_d_rejects_frees_the_blocks_at_once(pair):
    """VLLM makes up a request that is aborted when it has come (``AsyncLLM.notify_kv_transfer_request_rejected``)."""
    offer = offered(pair)
    del pair.asked["r"]
    assert used(pair.p) == 11
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": offer})
    stand_in = Request("r", [0], sampling, None, abort_immediately=True)

    def reject():
        pair.d.scheduler.add_request(stand_in)
        pair.d.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)

    pair.d.inbox.append(reject)
    pair.run()

    assert [used(engine) for engine in (pair.p, pair.d)] == [0, 0]
