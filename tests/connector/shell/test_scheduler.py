"""The scheduler half without an engine: vLLM's real block pool, a control thread, and no peer."""

import socket
import warnings
from types import SimpleNamespace

import pytest

from support.engines import FINGERPRINT, rank_info

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

    from xpyd_connector.shell.facts import Facts
    from xpyd_connector.shell.metadata import LingeringMetadata, RankHandshake
    from xpyd_connector.shell.scheduler import SchedulerSide

from xpyd_connector.core.ids import Address, BlockId, EngineId, RequestId
from xpyd_connector.core.messages import MAX_ID
from xpyd_connector.core.offers import Offer, digest_prompt, read_offer
from xpyd_connector.settings import Settings

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE, BLOCKS = 4, 20
PROMPT = list(range(10))  # three blocks, the last one partial


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Engine:
    """vLLM's scheduler, as far as the connector notices it."""

    def __init__(self):
        self.pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=SIZE)
        facts = Facts(
            EngineId("here"), Address("127.0.0.1", free_port()), SIZE, BLOCKS, ranks=1, lends=True, borrows=True
        )
        self.side = SchedulerSide(facts, Settings(handshake_timeout=0.1), lambda: None)
        self.side.bind_block_pool(self.pool)
        self.side.start({0: RankHandshake(rank_info("here"), FINGERPRINT)})

    def request(self, params=None, *, name="d-a", prompt=PROMPT, status=RequestStatus.FINISHED_LENGTH_CAPPED):
        return SimpleNamespace(
            request_id=name, kv_transfer_params=params, prompt_token_ids=prompt, num_prompt_tokens=len(prompt),
            num_computed_tokens=len(prompt), mm_features=[], lora_request=None, cache_salt=None, status=status,
            abort_immediately=False,
        )  # fmt: skip

    def arrive(self, **changes):
        request = self.request({**offer().to_params(), **changes})
        self.side.on_new_request(request)
        return request

    def allocate(self, request, external):
        blocks = self.pool.get_new_blocks(3)
        ids = [block.block_id for block in blocks]
        self.side.after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), external)
        return blocks

    def orders(self):
        return self.side.step(SimpleNamespace(total_num_scheduled_tokens=0)).orders

    def ended(self, *requests, lingers=(), let_go=()):
        news = LingeringMetadata([RequestId(r) for r in lingers], [RequestId(r) for r in let_go])
        self.side.after_step(KVConnectorOutput(finished_recving=set(requests), kv_connector_worker_meta=news))

    def free(self):
        return self.pool.get_num_free_blocks()


def offer(**changes):
    fields = {
        "remote_engine_id": EngineId("p0"), "remote_request_id": RequestId("p-a"), "remote_host": "127.0.0.1",
        "remote_port": 1, "remote_block_ids": ((BlockId(7), BlockId(8), BlockId(9)),), "remote_num_tokens": 10,
        "xpyd_prompt": digest_prompt(PROMPT, [], None),
    }  # fmt: skip
    return Offer(**{**fields, **changes})


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.side.stop()


def test_a_request_with_an_offer_is_loaded(engine):
    """All tokens but the last, once, into the blocks it was given."""
    request = engine.arrive()
    assert engine.side.matched_tokens(request, 0) == (9, True)
    blocks = engine.allocate(request, 9)
    (order,) = engine.orders()

    assert (order.blocks, order.into) == ([7, 8, 9], [block.block_id for block in blocks])
    assert engine.side.matched_tokens(request, 0) == (0, False)
    assert engine.orders() == []


def test_what_is_cached_here_is_not_loaded(engine):
    """Neither a part nor, if nothing is missing, anything."""
    request = engine.arrive()
    assert engine.side.matched_tokens(request, 8) == (1, True)
    engine.allocate(request, 0)

    assert engine.orders() == []
    assert engine.side.matched_tokens(request, 8) == (0, False)


BAD = [
    {"remote_port": 0},
    {"remote_block_ids": [[1], [2]]},
    {"remote_block_ids": [[1, 2]]},
    {"remote_num_tokens": 8},
    {"xpyd_prompt": "another"},
]


@pytest.mark.parametrize("change", BAD, ids=repr)
def test_an_offer_that_cannot_be_used_costs_a_local_prefill(engine, change):
    """Never an exception: it would stop the engine for everybody."""
    request = engine.arrive(**change)

    assert engine.side.matched_tokens(request, 0) == (0, False)
    assert sum(engine.side.stats().data["counters"].values()) == 1


def test_a_request_whose_own_id_does_not_fit_into_a_message_is_computed_here(engine):
    """A client chooses a part of it: a longer one would break the connection that keeps everybody's leases."""
    request = engine.request(offer().to_params(), name="x" * (MAX_ID + 1))
    engine.side.on_new_request(request)

    assert engine.side.matched_tokens(request, 0) == (0, False)


def test_blocks_that_nixl_may_still_write_into_are_kept_from_others(engine):
    """vLLM frees them when the load has failed; they come back when NIXL has let go."""
    request = engine.arrive()
    blocks = engine.allocate(request, 9)
    engine.ended("d-a", lingers=["d-a"])
    engine.pool.free_blocks(blocks)
    assert engine.free() == BLOCKS - 1 - 3
    assert engine.side.stats().data["gauges"]["blocks_lingering"] == 3
    engine.ended(let_go=["d-a"])

    assert engine.free() == BLOCKS - 1  # vLLM keeps one for itself
    assert engine.side.stats().data["gauges"]["blocks_lingering"] == 0


def test_every_rank_has_to_let_go(engine):
    """Their news arrive together or apart, in one step or in several."""
    blocks = engine.allocate(engine.arrive(), 9)
    engine.ended(lingers=["d-a"])
    engine.ended("d-a", lingers=["d-a"], let_go=["d-a"])
    engine.pool.free_blocks(blocks)
    assert engine.free() == BLOCKS - 1 - 3
    engine.ended(let_go=["d-a"])

    assert engine.free() == BLOCKS - 1


def test_a_load_that_lingers_for_no_time_changes_nothing(engine):
    """NIXL had let go before the engine heard of it: in one step."""
    blocks = engine.allocate(engine.arrive(), 9)
    engine.ended("d-a", lingers=["d-a"], let_go=["d-a"])
    engine.pool.free_blocks(blocks)

    assert engine.free() == BLOCKS - 1


def test_ranks_news_add_up():
    """vLLM merges them before the scheduler hears."""
    a, b = RequestId("a"), RequestId("b")
    both = LingeringMetadata([a], [b]).aggregate(LingeringMetadata([a, b], []))

    assert both == LingeringMetadata([a, a, b], [b])


def test_a_finished_prefill_is_lent(engine):
    """Its prompt's blocks stay in the pool's books after vLLM has freed its own hold on them."""
    request = engine.request({"do_remote_decode": True}, name="p-a")
    blocks = engine.pool.get_new_blocks(4)
    params = engine.side.finished(request, [block.block_id for block in blocks])
    engine.pool.free_blocks(blocks)

    assert read_offer(params).remote_block_ids == (tuple(block.block_id for block in blocks[:3]),)
    assert engine.free() == BLOCKS - 1 - 3


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_finish_is_not_lent(engine, status):
    """Its blocks hold half a prompt."""
    request = engine.request({"do_remote_decode": True}, status=status)

    assert engine.side.finished(request, [1, 2, 3]) is None
