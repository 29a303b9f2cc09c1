"""Whether a request that waits lacks blocks, with vLLM's own block pool."""

import warnings

import pytest

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.lease.kv_params import parse_pull_params

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.block_shortage import BlockShortage, ShortageTimer, takes_the_last_blocks
    from pdrelay_connector.shell.cache_specs import group_of
    from support.cache_kinds import Pair
    from support.kinds_table import KINDS
    from support.scheduled_engine import REVOKE

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE = 4
BLOCKS = 12
CACHED = 4
WAIT = 10.0
PLAYED = ("full attention", "chunks", *(["state of Mamba 2"] if vllm_versions.ASKS_WHAT_IS_LOADED else []))


def lacked_blocks(*, needs, in_use=0, group=None):
    """Return how many blocks a request lacks whose first ones are cached, and nothing else is free."""
    init_none_hash(sha256)
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
    hasher = get_request_block_hasher(SIZE, sha256)
    request = Request("waits", list(range(SIZE * needs)), SamplingParams(), None, block_hasher=hasher)
    blocks = pool.get_new_blocks(BLOCKS - 1)
    pool.cache_full_blocks(request, blocks, 0, CACHED, SIZE, 0)
    pool.free_blocks(blocks[in_use:CACHED])
    shortage = BlockShortage([group or CacheGroup(SIZE)])

    shortage.considered(request, SIZE * CACHED)
    short = shortage.step(pool)
    return short.blocks if short is not None else 0


def test_free_blocks_that_are_cached_for_a_request_are_no_room_for_its_other_tokens():
    """VLLM refuses it: each free block is one that it would use already. If nobody notices, leases keep it waiting."""
    assert lacked_blocks(needs=CACHED + 3) == 3


def test_cached_blocks_that_others_use_take_no_room():
    """They are not free, so the request needs none of the free ones for them."""
    assert lacked_blocks(needs=CACHED + 3, in_use=3) == 3


def test_leases_are_revoked_after_a_wait_and_then_once_a_second():
    """Blocks are free a step later; a shortage that ends begins anew."""
    timer = ShortageTimer(WAIT)
    steps = [(0.0, True), (WAIT, True), (WAIT + 0.5, True), (WAIT + 1.0, True), (WAIT + 2.0, False), (WAIT + 3.0, True)]

    assert [timer.is_due(is_short=short, now=now) for now, short in steps] == [False, True, False, True, False, False]


def test_a_request_whose_blocks_are_all_cached_lacks_none():
    assert lacked_blocks(needs=CACHED) == 0


def test_of_a_sliding_window_only_the_blocks_in_the_window_are_cached_for_a_request():
    """VLLM uses no block before it, though it is free and has the right KV."""
    assert lacked_blocks(needs=CACHED + 4, group=CacheGroup(SIZE, window=SIZE)) == 1


@pytest.mark.parametrize(
    ("used", "tokens", "takes"),
    [
        (0, 44, False),  # alone it may have all: it is preempted if that is too little
        (1, 40, True),
        (1, 36, False),  # a block is left
        (1, 44, False),  # it does not fit, and vLLM keeps what waits behind it
        (5, 24, True),
    ],
)
def test_a_load_that_takes_the_last_block_waits(used, tokens, takes):
    """With eleven blocks, none of which is cached for it."""
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
    pool.get_new_blocks(used)
    request = Request("waits", list(range(tokens + 1)), SamplingParams(), None)

    assert takes_the_last_blocks(pool, [CacheGroup(SIZE)], request, 0, tokens) is takes


def test_blocks_that_are_cached_for_a_load_are_not_left():
    """They are free until it takes them."""
    init_none_hash(sha256)
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
    hasher = get_request_block_hasher(SIZE, sha256)
    request = Request("waits", list(range(4 * SIZE + 1)), SamplingParams(), None, block_hasher=hasher)
    blocks = pool.get_new_blocks(BLOCKS - 1)
    pool.cache_full_blocks(request, blocks, 0, 2, SIZE, 0)
    pool.free_blocks(blocks[:4])

    assert takes_the_last_blocks(pool, [CacheGroup(SIZE)], request, 2 * SIZE, 4 * SIZE)


@pytest.mark.parametrize("name", PLAYED)
def test_loads_leave_a_block_for_the_next_token(name):
    """Two prompts fill the cache to its end, and each needs a block of every group for the token that D computes."""
    kind = KINDS[name]
    prompts = [[number, *[0, 1] * 28] for number in range(2)]
    groups = kind.specs(4)
    loaded = sum(group.loaded_blocks(56, 0) for group in map(group_of, groups))
    pair = Pair(kind.shape(blocks=200), kind.shape(blocks=1 + 2 * loaded))
    pair.d.movers[1].stuck = True
    for number, prompt in enumerate(prompts):
        pair.ask(f"r{number}", prompt, 3, "pull")
    pair.run(5.0)
    pair.d.movers[1].stuck = False
    pair.run(30.0)

    assert pair.is_done
    assert pair.d.loaded == {"r0", "r1"}


@pytest.mark.parametrize("tokens", [61, 62, 64, 65])
def test_a_lease_that_nobody_reads_stops_no_load(tokens):
    """The engine that renews it has more to do. 16 blocks are free beside it."""
    kind = KINDS["full attention"]
    offers = []
    pair = Pair(kind.shape(blocks=40), kind.shape(blocks=24))
    pair.awaited["lent"] = offers.append
    pair.d.ask("lent", [2] * 27, most=1, params={"do_remote_decode": True, "transfer_mode": "pull"})
    pair.run(1.0)
    offer = parse_pull_params(offers.pop())
    pair.p.control_runner.post(lambda control, now: control.lease_renewer.start_renewing("r", offer, now=now))
    pair.ask("r", [1] * tokens, 1, "pull")
    pair.run(REVOKE + 5.0)

    assert pair.is_done
    assert pair.d.loaded == {"r"}


@pytest.mark.parametrize("name", PLAYED)
def test_a_lease_that_nobody_reads_stops_no_request_that_has_its_kv(name):
    """The lease took the last blocks during the load. VLLM asks no connector about such a request any more."""
    kind = KINDS[name]
    offers = []
    pair = Pair(kind.shape(blocks=60), kind.shape(blocks=60))
    pair.d.movers[1].stuck = True
    pair.ask("r", [1] * 45, 1, "pull")
    pair.run(1.0)
    pair.awaited["lent"] = offers.append
    pair.d.ask("lent", [2] * 48, most=1, params={"do_remote_decode": True, "transfer_mode": "pull"})
    pair.run(1.0)
    offer = parse_pull_params(offers.pop())
    pair.p.control_runner.post(lambda control, now: control.lease_renewer.start_renewing("r", offer, now=now))
    others = pair.d.pool.get_new_blocks(pair.d.pool.get_num_free_blocks())
    pair.d.movers[1].stuck = False
    pair.run(REVOKE + 5.0)

    assert pair.is_done
    assert pair.d.loaded == {"r"}
    pair.d.pool.free_blocks(others)
