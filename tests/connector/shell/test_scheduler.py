"""The scheduler half without an engine: vLLM's real block pool, a control thread, and no peer."""

import logging
import queue
import socket
import threading
import warnings
from types import SimpleNamespace

import pytest

from support.adapters import write_adapter
from support.cluster import free_ports, wait_until
from support.engines import FINGERPRINT, changed, rank_info

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

    from pdrelay_connector.shell.control_thread import common_fingerprint
    from pdrelay_connector.shell.engine_config import EngineConfig
    from pdrelay_connector.shell.engine_waker import EngineWaker
    from pdrelay_connector.shell.held_blocks import HeldBlocks
    from pdrelay_connector.shell.metadata import RankHandshake, WorkerMetadata
    from pdrelay_connector.shell.prompt_identity import digest
    from pdrelay_connector.shell.scheduler import MAX_IDLE_WAIT, WALL_CLOCK, PDRelayConnectorScheduler

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLookup, Question
from pdrelay_connector.core.counters import StatsReport
from pdrelay_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.kv_params import PullParams, digest_prompt, parse_pull_params
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseEvent
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import MAX_ID, LentBlocks, RankSums
from pdrelay_connector.core.results import BlocksReleased, HandshakeEnded, LeaseLost, LoadChecks, LoadResult, PeerLost
from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.settings import Mode, Settings

pytestmark = [pytest.mark.edges, pytest.mark.timeout(240)]  # importing vLLM takes half a minute on a busy machine
SIZE, BLOCKS = 4, 20
PROMPT = list(range(10))  # three blocks, the last one partial
ONE = (CacheGroup(SIZE),)
IDLE = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={}, kv_connector_block_state=None)


class Engine:
    """vLLM's scheduler, as far as the connector notices it."""

    def __init__(
        self,
        *,
        groups=ONE,
        clock=WALL_CLOCK,
        is_producer=True,
        is_consumer=True,
        name="here",
        width=16,
        first_token=None,
        looks_back=None,
        prefix_hash="",
        input_queue=None,
        **choices,
    ):
        self.pool = BlockPool(BLOCKS, enable_caching=bool(prefix_hash), hash_block_size=SIZE)
        engine_config = EngineConfig(
            EngineId(name), Address("127.0.0.1", free_ports(1)[0]), groups, {"l.0": 0}, BLOCKS, all_heads=1, ranks=1,
            is_producer=is_producer, is_consumer=is_consumer, first_token=first_token or {}, prefix_hash=prefix_hash,
            looks_back=looks_back or {},
        )  # fmt: skip
        self.now = 1000.0
        # Nobody is there to be met: only a test that waits for the end of a handshake has it end.
        settings = Settings(**{"handshake_timeout": 600.0} | choices)
        self.side = PDRelayConnectorScheduler(
            engine_config, settings, EngineWaker(input_queue), clock, lambda: self.now
        )
        self.side.bind_gpu_block_pool(self.pool)
        self.port, memory = engine_config.address.port, rank_info(name, width=width)
        self.side.start({0: RankHandshake(memory, memory, FINGERPRINT, b"token")}, FINGERPRINT)
        self.side._decodes.handshake_ended(HandshakeEnded(EngineId("p0")))  # it was met by an earlier request

    def request(
        self, params=None, *, name="d-a", prompt=PROMPT, status=RequestStatus.FINISHED_LENGTH_CAPPED, priority=0
    ):
        return SimpleNamespace(
            request_id=name, kv_transfer_params=params, prompt_token_ids=prompt, num_prompt_tokens=len(prompt),
            num_computed_tokens=len(prompt), mm_features=[], lora_request=None, cache_salt=None, status=status,
            abort_immediately=False, num_tokens=len(prompt), priority=priority, arrival_time=4990.0,
            num_output_tokens=0, block_hashes=[],
        )  # fmt: skip

    def arrive(self, *, name="d-a", **changes):
        request = self.request({**offer().to_params(), **changes}, name=name)
        self.side.on_new_request(request)
        return request

    def matched(self, request, computed):
        return self.side.get_num_new_matched_tokens(request, computed)

    def allocate(self, request, external):
        blocks = self.pool.get_new_blocks(3)
        ids = [block.block_id for block in blocks]
        self.side.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), external)
        return blocks

    def orders(self):
        return self.side.build_connector_meta(IDLE).orders

    def ended(self, *requests, failed=(), quarantined=(), released=()):
        news = WorkerMetadata([RequestId(r) for r in quarantined], [RequestId(r) for r in released])
        output = KVConnectorOutput(finished_recving=set(requests), kv_connector_worker_meta=news)
        output.failed_recving = set(failed)
        self.side.update_connector_output(output)

    def free(self):
        return self.pool.get_num_free_blocks()


def offer(**changes):
    fields = {
        "remote_engine_id": EngineId("p0"), "remote_request_id": RequestId("p-a"), "remote_host": "127.0.0.1",
        "remote_port": 1, "remote_block_ids": ((BlockId(7), BlockId(8), BlockId(9)),), "remote_num_tokens": 10,
        "pdrelay_prompt": digest_prompt(PROMPT, [], None),
    }  # fmt: skip
    return PullParams(**{**fields, **changes})


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.side.shutdown()


@pytest.fixture
def lines():
    """What the connector logs: level and text. VLLM's loggers do not tell pytest's."""
    lines = []
    log = logging.getLogger("vllm.pdrelay")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.mark.parametrize(("borrows", "times"), [(True, 1), (False, 0)])
def test_an_engine_that_can_only_take_kv_from_this_machine_says_so_at_start(lines, borrows, times):
    """Once, and only one that takes KV over: who lends is met by others or is not."""
    engine = Engine(is_consumer=borrows)
    engine.arrive()
    engine.side.shutdown()

    assert [name for name, line in lines if "engines of this machine only" in line] == ["INFO"] * times


@pytest.mark.parametrize(
    ("host", "ended", "times"),
    [
        ("localhost", {"failure": "connection refused", "is_absent": True}, 1),
        ("127.0.0.1", {"objection": "engine p2 answers there", "is_absent": True}, 1),
        ("127.0.0.1", {"objection": "its layers are 4, ours are 8"}, 0),
        ("127.0.0.1", {}, 0),
        ("10.0.0.1", {"failure": "timed out", "is_absent": True}, 0),
    ],
)
def test_an_engine_elsewhere_that_says_localhost_is_named_once(engine, lines, host, ended, times):
    """It is vLLM's default: D dials itself, where nothing listens, or D's own side channel."""
    for name in ("d-a", "d-b"):
        engine.arrive(remote_engine_id="p1", remote_host=host, name=name)
        engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1"), is_final=False, **ended))

    named = [line for _, line in lines if "set VLLM_NIXL_SIDE_CHANNEL_HOST on it" in line]
    assert len(named) == times
    assert all(f"engine p1 says that it is at {host}:1, which is this machine" in line for line in named)


def test_requests_without_params_are_counted_and_named_once_others_come_with_them(engine, lines):
    """A router that loses the params is seen nowhere else: all texts are right."""
    engine.side.on_new_request(engine.request(name="d-first"))
    assert not any("without kv_transfer_params" in line for _, line in lines)
    engine.arrive()
    for name in ("d-b", "d-c"):
        engine.side.on_new_request(engine.request(name=name))

    (said,) = [line for _, line in lines if "without kv_transfer_params" in line]
    assert "d-b" in said
    assert engine.side.get_kv_connector_stats().data["counters"]["requests_without_kv_params"] == 3


def test_an_engine_that_loads_nothing_does_not_count_them():
    engine = Engine(is_consumer=False)
    engine.side.on_new_request(engine.request())
    engine.side.shutdown()

    assert engine.side.get_kv_connector_stats().data["counters"] == {}


def test_a_new_prefill_engine_is_met_before_its_kv_is_asked_for(engine):
    """Blocks that are allocated for a load that cannot be end in an error, where the policy says so."""
    engine.side.handle_results = lambda: None  # the refused connection may have been reported by now
    request = engine.arrive(remote_engine_id="p1")
    short = engine.request({**offer().to_params(), "remote_engine_id": "p1"}, name="d-b", prompt=PROMPT[:1])
    engine.side.on_new_request(short)

    assert engine.matched(request, 0) == (None, False)
    assert engine.matched(request, 9) == engine.matched(short, 0) == (0, False)
    engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1")))
    assert engine.matched(request, 0) == (9, True)
    later = engine.arrive(remote_engine_id="p1", remote_request_id="p-c", name="d-c")
    assert engine.matched(later, 0) == (9, True)


def test_an_incompatible_prefill_engine_costs_a_local_prefill(engine):
    """Now and for each later request: it stays as it is while it runs. Others are loaded from."""
    first = engine.arrive(remote_engine_id="p1")
    engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1"), "its layers are 4, ours are 8"))
    later = engine.arrive(remote_engine_id="p1", name="d-b")

    assert engine.matched(first, 0) == engine.matched(later, 0) == (0, False)
    stats = engine.side.get_kv_connector_stats()
    assert stats.data["counters"]["loads_skipped_incompatible"] == 2
    assert stats.data["incompatible"] == ["p1"]
    engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1"), "its layers are 4, ours are 8"))
    assert engine.side.get_kv_connector_stats() is None
    assert engine.matched(engine.arrive(name="d-c"), 0) == (9, True)


def test_an_engine_that_starts_again_under_its_id_is_met_anew(engine):
    """An operator may have given it the id, and other weights since: once refused it was refused for ever."""
    engine.arrive(remote_engine_id="p1")
    engine.side._decodes.peer_changed(HandshakeEnded(EngineId("p1"), "its weights are 'a', ours are 'b'"))
    assert engine.side.get_kv_connector_stats().data["incompatible"] == ["p1"]
    engine.side._decodes.peer_changed(PeerLost(EngineId("p1")))
    later = engine.arrive(remote_engine_id="p1", name="d-b")
    assert engine.matched(later, 0) == (None, False)
    engine.side._decodes.peer_changed(HandshakeEnded(EngineId("p1")))

    assert engine.matched(later, 0) == (9, True)
    assert engine.side.get_kv_connector_stats().data["compatible"] == ["p1"]


def test_an_engine_that_refuses_us_costs_a_local_prefill_and_is_met_again(engine):
    """Secrets change while it runs, and what it refuses now it may take later."""
    request = engine.arrive(remote_engine_id="p1")
    engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1"), "it refused", is_final=False))

    assert engine.matched(request, 0) == (0, False)
    assert engine.matched(engine.arrive(remote_engine_id="p1", name="d-b"), 0) == (None, False)


def test_the_load_from_an_engine_that_does_not_answer_has_failed(engine):
    """The policy decides about it. No worker waits for another handshake, which would take as long once more."""
    request = engine.arrive(remote_engine_id="p1")
    engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1"), failure="timed out", is_final=False))
    assert engine.matched(request, 0) == (9, True)
    engine.allocate(request, 9)
    metadata = engine.side.build_connector_meta(IDLE)

    assert [(result.request, "timed out" in result.failure) for result in metadata.arrived] == [("d-a", True)]
    assert metadata.orders == []
    assert engine.side.get_kv_connector_stats().data["counters"]["loads_failed_handshake"] == 1
    assert engine.matched(engine.arrive(remote_engine_id="p1", name="d-b"), 0) == (None, False)


@pytest.mark.parametrize("mode", Mode)
def test_nothing_is_renewed_at_an_engine_that_does_not_answer(mode):
    """Else each request that met a dead engine has that engine dialled for as long as this one runs."""
    engine = Engine(mode=mode)
    transfer = {"transfer_id": "t"} if mode is Mode.PULL else {"transfer_id": "t", "transfer_mode": "push"}
    request = engine.arrive(remote_engine_id="p1", **transfer)
    renewer = engine.side._control._runner._core.lease_renewer
    wait_until(lambda: len(renewer) == 1, seconds=10, what="the lease is renewed")
    engine.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1"), failure="timed out", is_final=False))
    engine.allocate(request, 9)
    engine.ended(*[str(result.request) for result in engine.side.build_connector_meta(IDLE).arrived], failed=("d-a",))

    wait_until(lambda: len(renewer) == 0, seconds=10, what="the lease is given back")
    engine.side.shutdown()


def test_pipeline_stages_with_other_attention_backends_are_refused():
    """Each worker knows its own stage only: peers would be told the backends of one of them."""
    memory = rank_info("p")
    stages = {
        stage: RankHandshake(memory, memory, changed(FINGERPRINT, attention=name)) for stage, name in enumerate("AAB")
    }
    with pytest.raises(UnsupportedCache, match=r"different attention backends \(A and B\)"):
        common_fingerprint(stages)
    del stages[2]

    assert common_fingerprint(stages).attention == "A"


def test_the_control_thread_reports_a_handshake():
    """Here that of an engine which nobody can reach: the request does not wait for ever."""
    engine = Engine(handshake_timeout=0.1)
    request = engine.arrive(remote_engine_id="p1")

    def is_known():
        engine.side.handle_results()
        return engine.matched(request, 0) == (9, True)

    wait_until(is_known, seconds=30, what="the handshake ends")
    engine.side.shutdown()


@pytest.mark.parametrize(("width", "skipped"), [(16, 0), (32, 1)])
def test_the_handshake_of_two_engines_decides(width, skipped):
    """Over a real connection, by the shapes alone: versions and models are equal (and P holds no such lease)."""
    engine, p = Engine(handshake_timeout=30.0), Engine(name="p1", width=width)
    request = engine.arrive(remote_engine_id="p1", remote_port=p.port)

    def is_known():
        engine.side.handle_results()
        return engine.matched(request, 0) != (None, False)

    wait_until(is_known, seconds=30, what="the handshake ends")
    engine.side.shutdown()
    p.side.shutdown()
    engine.side.shutdown()

    assert engine.side.get_kv_connector_stats().data["counters"].get("loads_skipped_incompatible", 0) == skipped


def test_a_request_with_an_offer_is_loaded(engine):
    """All tokens but the last, once, into the blocks it was given."""
    request = engine.arrive()
    assert engine.matched(request, 0) == (9, True)
    blocks = engine.allocate(request, 9)
    (order,) = engine.orders()

    assert order.token_ranges == (TokenRange(0, 0, 9, (7, 8, 9), [block.block_id for block in blocks]),)
    assert engine.matched(request, 0) == (0, False)
    assert engine.orders() == []


def test_what_is_cached_here_is_not_loaded(engine):
    """Neither a part nor, if nothing is missing, anything."""
    request = engine.arrive()
    assert engine.matched(request, 8) == (1, True)
    engine.allocate(request, 0)

    assert engine.orders() == []
    assert engine.matched(request, 8) == (0, False)


def test_the_answers_of_one_prompt_share_a_load(engine):
    """One reads P's blocks; the others wait, and find them in the cache here: P's lease ends with the first read."""
    first, second = engine.arrive(name="d-a"), engine.arrive(name="d-b")
    assert engine.matched(second, 0) == (None, False)  # also if it is asked before the first
    assert engine.matched(first, 0) == (9, True)
    engine.allocate(first, 9)
    first.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.matched(second, 0) == (None, False)
    assert len(engine.orders()) == 1

    engine.ended("d-a")
    assert engine.matched(second, 0) == (None, False)  # vLLM has yet to enter the blocks into its cache
    first.status = RequestStatus.RUNNING
    assert engine.matched(second, 8) == (0, False)
    engine.allocate(second, 0)
    late = engine.arrive(name="d-c")
    assert engine.matched(late, 8) == (0, False)
    for request in (first, second, late):
        engine.side.request_finished(request, ([],))
    assert engine.matched(engine.arrive(name="d-d"), 8) == (0, False)
    assert engine.orders() == []
    assert counters(engine)["loads_shared"] == 3


@pytest.mark.parametrize("end", ["aborted", "lease lost", "incompatible"])
def test_an_answer_does_not_wait_for_one_that_loads_nothing(engine, end):
    """It computes the prompt itself."""
    first, second = engine.arrive(name="d-a"), engine.arrive(name="d-b")
    if end == "aborted":
        first.status = RequestStatus.FINISHED_ABORTED
        engine.side.request_finished(first, ([],))
    elif end == "lease lost":
        engine.side._decodes.lease_lost(RequestId("d-a"))
    else:
        engine.side._decodes._skip_incompatible(RequestId("d-a"), HandshakeEnded(EngineId("p0"), "another model"))

    assert engine.matched(second, 0) == (0, False)
    assert engine.orders() == []
    assert engine.matched(engine.arrive(name="d-c"), 0) == (9, True)  # asked later, it may load


def test_a_prompt_whose_load_failed_is_loaded_by_the_next_request_for_it(engine):
    """The blocks are not here, and P may hold them still: unread, they would be held until their lease expires."""
    first, waiting = engine.arrive(name="d-a"), engine.arrive(name="d-b")
    engine.allocate(first, 9)
    engine.orders()
    first.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    engine.ended("d-a", failed=["d-a"])

    assert engine.matched(waiting, 0) == (0, False)  # it computes the prompt, as the first one does
    late = engine.arrive(name="d-c")
    assert engine.matched(late, 0) == (9, True)
    engine.side.request_finished(first, ([],))
    engine.side.request_finished(waiting, ([],))
    assert engine.matched(engine.arrive(name="d-d"), 0) == (None, False)  # it waits for the third


def lora(folder, name="an adapter"):
    return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(folder))


def test_an_adapter_with_other_weights_is_another_adapter(engine, tmp_path):
    """Under one name at both engines: a sentence and a counter of its own, and the prompt is computed here."""
    p, d = (write_adapter(tmp_path / name, seed=seed) for name, seed in (("p", 1), ("d", 2)))
    params = dict.fromkeys(("same", "other"))
    for which, folder in (("same", d), ("other", p)):
        prefill = engine.request({"do_remote_decode": True}, name=f"p-{which}")
        prefill.lora_request = lora(folder)
        blocks = [block.block_id for block in engine.pool.get_new_blocks(3)]
        params[which] = engine.side.request_finished(prefill, (blocks,)) | {"remote_engine_id": "p0"}
    matched = {}
    for which, offered in params.items():
        request = engine.request(offered, name=f"d-{which}")
        request.lora_request = lora(d)
        engine.side.on_new_request(request)
        matched[which] = engine.matched(request, 0)

    assert matched == {"same": (9, True), "other": (0, False)}
    assert counters(engine)["kv_params_other_adapter"] == 1


def test_an_offer_that_names_no_adapter_is_of_another_adapter(engine):
    """An engine of protocol 9 digests the adapter's name alone: the prompt is the same, and the sentence says so."""
    request = engine.request(offer().to_params())
    request.lora_request = lora("/nowhere")
    engine.side.on_new_request(request)

    assert engine.matched(request, 0) == (0, False)
    assert counters(engine)["kv_params_other_adapter"] == 1


def test_the_digest_of_a_prompt_covers_its_adapter(engine, tmp_path):
    """In push P compares nothing else: the adapter has no field of its own there."""
    request = engine.request({})
    digests = {digest(request, 9)}
    for name, seed in (("p", 1), ("d", 2)):
        request.lora_request = lora(write_adapter(tmp_path / name, seed=seed))
        digests.add(digest(request, 9))

    assert len(digests) == 3


@pytest.mark.parametrize("changes", [{"mm_features": ["an image"]}, {"cache_salt": "salt"}])
def test_the_same_tokens_with_other_inputs_are_another_prompt(engine, changes):
    """Their KV is another one: it is not loaded, and the prompt is computed here."""
    request = engine.request(offer().to_params())
    request.mm_features = [SimpleNamespace(identifier=each) for each in changes.get("mm_features", ())]
    request.cache_salt = changes.get("cache_salt")
    engine.side.on_new_request(request)

    assert engine.matched(request, 0) == (0, False)
    assert counters(engine)["kv_params_other_prompt"] == 1


@pytest.mark.parametrize("lent", [8, 10], ids=["whole blocks", "a part of a block"])
@pytest.mark.parametrize("group", [CacheGroup(SIZE), CacheGroup(SIZE, window=6), CacheGroup(SIZE, chunk=8)], ids=repr)
def test_a_prompt_with_the_token_that_p_has_made_is_loaded_up_to_it(group, lent):
    """A router has shown that token, and has D go on behind it: all that P has computed is read, and no block more."""
    engine = Engine(groups=(group,))
    prompt = list(range(lent + 1))
    held = -(-lent // SIZE)
    params = offer(
        remote_block_ids=(tuple(range(7, 7 + held)),),
        remote_num_tokens=lent,
        pdrelay_prompt=digest_prompt(prompt[:lent], [], None),
    ).to_params()
    request = engine.request(params, prompt=prompt)
    engine.side.on_new_request(request)
    assert engine.matched(request, 0) == (lent, True)
    blocks = [block.block_id for block in engine.allocate(request, lent)]
    orders = engine.orders()
    start = min(lent, group.first_needed(lent))
    engine.side.shutdown()

    part = slice(start // SIZE, held)
    first = start // SIZE * SIZE  # whole blocks, also of a window
    wanted = [TokenRange(0, first, lent, tuple(range(7, 7 + held))[part], blocks[part])] if start < lent else []
    assert [each for order in orders for each in order.token_ranges] == wanted
    assert "kv_params_other_prompt" not in engine.side.get_kv_connector_stats().data["counters"]


@pytest.mark.parametrize("prompt", [[*range(10), 10, 11], [*range(9), 10, 11]], ids=["two tokens more", "another"])
def test_a_prompt_that_is_longer_in_another_way_is_computed_here(engine, prompt):
    """P has made one token, and nothing is known of what would follow."""
    request = engine.request(offer().to_params(), prompt=prompt)
    engine.side.on_new_request(request)

    assert engine.matched(request, 0) == (0, False)


BAD = [
    {"remote_port": 0},
    {"remote_block_ids": [[1], [2]]},
    {"remote_block_ids": [[1, 2]]},
    {"remote_num_tokens": 8},
    {"pdrelay_prompt": "another"},
]


@pytest.mark.parametrize("change", BAD, ids=repr)
def test_an_offer_that_cannot_be_used_costs_a_local_prefill(engine, change):
    """Never an exception: it would stop the engine."""
    request = engine.arrive(**change)

    assert engine.matched(request, 0) == (0, False)
    assert sum(engine.side.get_kv_connector_stats().data["counters"].values()) == 1


def test_a_request_whose_own_id_does_not_fit_into_a_message_is_computed_here(engine):
    """A client chooses a part of it: a longer one would break the connection that renews all leases."""
    request = engine.request(offer().to_params(), name="x" * (MAX_ID + 1))
    engine.side.on_new_request(request)

    assert engine.matched(request, 0) == (0, False)


def test_blocks_that_nixl_may_still_write_into_are_kept_from_others(engine):
    """vLLM frees them when the load has failed; they come back when NIXL no longer writes."""
    request = engine.arrive()
    blocks = engine.allocate(request, 9)
    engine.ended("d-a", quarantined=["d-a"])
    engine.pool.free_blocks(blocks)
    assert engine.free() == BLOCKS - 1 - 3
    assert engine.side.get_kv_connector_stats().data["gauges"]["blocks_quarantined"] == 3
    engine.ended(released=["d-a"])

    assert engine.free() == BLOCKS - 1  # vLLM keeps one for itself
    assert engine.side.get_kv_connector_stats().data["gauges"]["blocks_quarantined"] == 0


def test_an_idle_engine_polls_quarantined_blocks(engine):
    """The workers report them with a step only. The engine waits between two steps."""
    waits = []
    engine.side._waker = SimpleNamespace(wait=waits.append)
    engine.allocate(engine.arrive(), 9)
    engine.side.build_connector_meta(IDLE)
    assert (engine.side.has_pending_push_work(), waits) == (False, [])
    engine.ended("d-a", quarantined=["d-a"])
    engine.side.build_connector_meta(IDLE)
    assert (engine.side.has_pending_push_work(), waits) == (True, [MAX_IDLE_WAIT])
    engine.ended(released=["d-a"])

    assert not engine.side.has_pending_push_work()


def test_every_rank_has_to_let_go(engine):
    """Their news arrive together or apart, in one step or in several."""
    blocks = engine.allocate(engine.arrive(), 9)
    engine.ended(quarantined=["d-a"])
    engine.ended("d-a", quarantined=["d-a"], released=["d-a"])
    engine.pool.free_blocks(blocks)
    assert engine.free() == BLOCKS - 1 - 3
    engine.ended(released=["d-a"])

    assert engine.free() == BLOCKS - 1


def test_a_quarantine_that_ends_in_the_same_step_changes_nothing(engine):
    """The load fails and its quarantine ends within one step."""
    blocks = engine.allocate(engine.arrive(), 9)
    engine.ended("d-a", quarantined=["d-a"], released=["d-a"])
    engine.pool.free_blocks(blocks)

    assert engine.free() == BLOCKS - 1


def test_ranks_news_add_up():
    """vLLM merges them before the scheduler receives them."""
    a, b = RequestId("a"), RequestId("b")
    both = WorkerMetadata([a], [b]).aggregate(WorkerMetadata([a, b], []))

    assert both == WorkerMetadata([a, a, b], [b])


def test_a_finished_prefill_is_lent(engine):
    """Its prompt's blocks stay in the pool's books after vLLM has freed its own hold on them."""
    request = engine.request({"do_remote_decode": True}, name="p-a")
    blocks = engine.pool.get_new_blocks(4)
    params = engine.side.request_finished(request, ([block.block_id for block in blocks],))
    engine.pool.free_blocks(blocks)

    assert parse_pull_params(params).remote_block_ids == (tuple(block.block_id for block in blocks[:3]),)
    assert engine.free() == BLOCKS - 1 - 3


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED])
def test_routers_are_told_of_the_token_beside_the_offer(status):
    """It is for routers: no decode engine acts on it, and no signature covers it."""
    says = {"pdrelay_first_token": {"apis": ["completions"], "max_model_len": 64}}
    engine = Engine(first_token=says)
    request = engine.request({"do_remote_decode": True}, name="p-a", status=status)
    blocks = engine.pool.get_new_blocks(3)
    params = engine.side.request_finished(request, ([block.block_id for block in blocks],))
    engine.side.shutdown()

    assert params == parse_pull_params(params).to_params() | says | {"pdrelay_lease": Settings().kv_lease_duration}


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_finish_is_not_lent(engine, status):
    """Its blocks hold half a prompt."""
    request = engine.request({"do_remote_decode": True}, status=status)

    assert engine.side.request_finished(request, ([1, 2, 3],)) is None


def test_a_prefill_of_an_engine_that_is_no_producer_is_named_once(lines):
    """VLLM's NixlConnector lends whatever its role is: with another router the texts stay right, and nothing moves."""
    engine = Engine(is_producer=False)
    for name in ("p-a", "p-b"):
        request = engine.request({"do_remote_decode": True}, name=name)
        engine.side.on_new_request(request)
        assert engine.side.request_finished(request, ([1, 2, 3],)) is None
    engine.side.shutdown()

    (said,) = [line for level, line in lines if level == "WARNING" and "kv_role" in line]
    assert "p-a is not handed over: this engine's kv_role is kv_consumer" in said


# ---- engines with a secret


SECRET = b"secret"
NOW = 1_800_000_000.0  # s since the epoch, on every engine's clock


@pytest.fixture
def proving():
    engine = Engine(secrets=(SECRET,), clock=lambda: NOW)
    yield engine
    engine.side.shutdown()


def signed(*, secret=SECRET, **changes):
    offer_ = offer(**{"remote_host": "10.0.0.1", "pdrelay_expires_at": int(NOW) + 30, **changes})
    return Signatures(lambda: (secret,)).sign(offer_).to_params()


def refusals(engine, params, **request):
    """Nothing is loaded; return what is counted."""
    arrived = engine.request(params, **request)
    engine.side.on_new_request(arrived)
    assert engine.matched(arrived, 0) == (0, False)
    assert len(engine.side._decodes._remote_prefills) == 0
    return engine.side.get_kv_connector_stats().data["counters"]


def test_a_finished_prefill_is_lent_with_a_proof(proving):
    """Which another engine with the secret takes, as long as the lease may run."""
    request = proving.request({"do_remote_decode": True}, name="p-a")
    params = proving.side.request_finished(request, ([block.block_id for block in proving.pool.get_new_blocks(3)],))

    assert params["pdrelay_expires_at"] == NOW + Settings().kv_lease_duration
    assert Signatures(lambda: (SECRET,)).check(parse_pull_params(params), now=NOW)


def test_an_offer_with_a_proof_is_loaded(proving):
    """The prompt is this one, and so is the time."""
    request = proving.request(signed())
    proving.side.on_new_request(request)

    assert proving.matched(request, 0) == (9, True)


@pytest.mark.parametrize(
    ("params", "counter"),
    [
        (offer().to_params(), "kv_params_unsigned"),
        (signed() | {"remote_block_ids": [[3, 4, 5]]}, "kv_params_forged"),
        (signed(pdrelay_expires_at=int(NOW) - 301), "kv_params_expired"),
        (signed(pdrelay_prompt=None), "kv_params_other_prompt"),
    ],
    ids=["unsigned", "blocks", "old", "no digest"],
)
def test_an_offer_that_is_not_proven_costs_a_local_prefill(proving, params, counter):
    """It may name the blocks of any request; the text is right all the same, and a counter reports it."""
    assert refusals(proving, params) == {counter: 1}


def test_an_offer_that_is_not_proven_does_not_end_a_lease(proving):
    """vLLM's made-up request for one that it rejected gives back what its params name: they may be another's."""
    request = proving.request(offer().to_params(), prompt=[0])
    request.abort_immediately = True
    proving.side.on_new_request(request)
    proving.side.request_finished(request, ([],))

    assert proving.side.get_kv_connector_stats().data["counters"] == {"kv_params_unsigned": 1}


def test_without_a_secret_an_offer_needs_neither_proof_nor_digest(engine):
    """vLLM's own connector, as a prefill engine, sends neither."""
    request = engine.arrive(pdrelay_prompt=None)

    assert engine.matched(request, 0) == (9, True)


def test_prompts_without_token_ids_have_nothing_to_compare(proving):
    """Embeddings, on both sides; but the proof is asked for."""
    request = proving.request(signed(pdrelay_prompt=None))
    request.prompt_token_ids = None
    proving.side.on_new_request(request)

    assert proving.matched(request, 0) == (9, True)


# ---- leases that end early, and are not granted


def lend(engine, name, blocks, transfer=None, **options):
    """Finish a prefill of so many blocks; vLLM frees its own hold on them. Returns the offer, or None."""
    params = {"do_remote_decode": True, "transfer_id": transfer}
    request = engine.request(params, name=name, prompt=list(range(SIZE * blocks)), **options)
    held = engine.pool.get_new_blocks(blocks)
    offer = engine.side.request_finished(request, ([block.block_id for block in held],))
    engine.pool.free_blocks(reversed(held))
    return offer


def abandon(engine, transfer):
    """A request says that nobody will come for another one's blocks."""
    params = {"do_remote_decode": False, "do_remote_prefill": False, "abandoned_transfer_id": transfer}
    request = engine.request(params, name="says-so", prompt=[0])
    engine.side.on_new_request(request)
    settle(engine)
    assert engine.side.request_finished(request, ([],)) is None


def test_blocks_that_nobody_will_come_for_are_freed_at_once(engine):
    """The client left when P had finished, and the router had not heard of it."""
    assert lend(engine, "a", 5, transfer="xfer-a")
    assert lend(engine, "b", 5, transfer="xfer-b")
    abandon(engine, "xfer-a")

    assert engine.free() == 14
    seen = counters(engine)
    assert (seen["transfers_abandoned"], seen["leases_dropped"]) == (1, 1)
    assert list(engine.side._prefills._held_blocks._leases) == ["b"]


def test_a_request_whose_id_no_decode_engine_takes_is_not_leased(engine):
    """Its blocks would be held in vain for as long as a lease lasts, and a client chooses a part of the id."""
    assert lend(engine, "a\nb", 5) is None
    settle(engine)

    assert engine.free() == 19
    assert counters(engine)["leases_refused"] == 1
    assert lend(engine, "b", 5)


def test_a_prefill_that_was_abandoned_before_its_end_leases_nothing(engine):
    """The router's word may overtake the end of the request."""
    abandon(engine, "xfer-a")
    assert lend(engine, "a", 5, transfer="xfer-a") is None
    settle(engine)

    assert engine.free() == 19
    assert "leases_granted" not in counters(engine)
    assert lend(engine, "b", 5, transfer="xfer-b")


@pytest.mark.parametrize("transfer", [5, "x" * 100_000, "xfer-of nobody"])
def test_a_transfer_that_is_not_there_is_abandoned_in_vain(engine, transfer):
    """Whatever a request says: no lease ends that it does not name."""
    assert lend(engine, "a", 5, transfer="xfer-a")
    abandon(engine, transfer)

    assert engine.free() == 14


def lack(engine, *, blocks, seconds, priority=0, step=0.5):
    """Have a waiting request ask for blocks in vain for so long, as vLLM does in each step."""
    request = engine.request(name="waits", prompt=list(range(SIZE * blocks)), priority=priority)
    until = engine.now + seconds
    while engine.now <= until:
        engine.matched(request, 0)
        engine.side.build_connector_meta(IDLE)
        engine.now += step


def settle(engine):
    """Wait until the control thread has run its commands and handed over their results (one turn later)."""
    for _ in range(2):
        done = threading.Event()
        engine.side._control.post(lambda control, now, done=done: done.set())
        assert done.wait(60), "the control thread does not run"
    engine.side.build_connector_meta(IDLE)


def counters(engine):
    return engine.side.get_kv_connector_stats().data.get("counters", {})


def revoked_after(engine, **lacks):
    lack(engine, **lacks)
    settle(engine)
    return counters(engine)["leases_revoked"]


def test_a_request_that_gets_its_blocks_lacks_none(engine):
    """However few are left for others."""
    lend(engine, "a", 15)
    for _ in range(30):
        request = engine.request(name="gets", prompt=list(range(SIZE * 8)))
        engine.matched(request, 0)
        engine.side.update_state_after_alloc(request, SimpleNamespace(get_block_ids=list), 0)
        engine.side.build_connector_meta(IDLE)
        engine.now += 1.0

    assert len(engine.side._prefills._held_blocks) == 1


def test_the_least_important_leases_are_revoked_first_and_never_more_important_ones(engine):
    """VLLM's priorities: a higher number is less important."""
    for name, priority in (("old", 1), ("least", 5), ("most", -1)):
        assert lend(engine, name, 5, priority=priority)

    assert revoked_after(engine, blocks=8, seconds=10.5, priority=1) == 1
    assert list(engine.side._prefills._held_blocks._leases) == ["old", "most"]
    assert [each.request for each in engine.side._prefills._held_blocks.candidates(19, 1)] == ["old"]


def test_blocks_that_others_use_do_not_count_as_freed():
    """Two leases of prompts that begin alike share blocks: only the end of both frees these."""
    pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=SIZE)
    shared = pool.get_new_blocks(4)
    own = pool.get_new_blocks(1)
    used = pool.get_new_blocks(2)
    holding = HeldBlocks()
    for name, blocks in (("a", shared), ("b", shared + own), ("c", used)):
        pool.touch(blocks)
        holding.add(RequestId(name), list(blocks), 0)
    pool.free_blocks(shared + own)  # vLLM's own hold; what "c" is made of is still used

    assert holding.blocks == 7
    assert holding.candidates(5, 0) == [("a", 0), ("b", 5), ("c", 0)]


def test_revoking_can_be_turned_off():
    """Where a decode engine must never compute a prompt."""
    engine = Engine(revoke_after=0.0)
    lend(engine, "a", 15)
    lack(engine, blocks=8, seconds=100.0)
    settle(engine)
    engine.side.shutdown()

    assert len(engine.side._prefills._held_blocks) == 1


def test_leases_hold_no_more_than_their_share_of_the_cache():
    """Beyond it a prefill is not handed over: otherwise decode engines that read nothing would stop all prefills."""
    engine = Engine(max_held_share=0.5)  # of 19 blocks
    assert lend(engine, "a", 9)
    assert lend(engine, "b", 1) is None
    engine.side.shutdown()

    assert counters(engine)["leases_refused"] == 1
    assert engine.side.get_kv_connector_stats() is None or engine.free() == 10


def test_a_single_lease_may_hold_all_of_the_cache():
    """A prompt that is nearly as long as P's cache would be computed twice, always."""
    engine = Engine(max_held_share=0.5)
    offer = lend(engine, "a", 19)
    engine.side.shutdown()

    assert offer is not None


def test_blocks_that_are_held_already_cost_nothing_of_the_share():
    """Prompts that begin alike share them."""
    engine = Engine(max_held_share=0.5)
    blocks = engine.pool.get_new_blocks(9)
    for name in ("a", "b"):
        request = engine.request({"do_remote_decode": True}, name=name, prompt=list(range(SIZE * 9)))
        assert engine.side.request_finished(request, ([block.block_id for block in blocks],))
    engine.side.shutdown()

    assert engine.side.get_kv_connector_stats().data["gauges"]["blocks_held"] == 9


def test_a_request_whose_lease_is_lost_computes_its_own_prompt_at_once(engine):
    """Not after it has been read in vain."""
    request = engine.arrive()
    assert engine.matched(request, 0) == (9, True)
    engine.side._control._outbox.put([LeaseLost(RequestId("d-a"))], StatsReport())
    assert engine.side.has_pending_push_work()
    engine.side.build_connector_meta(IDLE)

    assert engine.matched(request, 0) == (0, False)
    engine.allocate(request, 0)
    assert engine.orders() == []
    assert counters(engine)["loads_skipped_lease_lost"] == 1


def test_a_load_that_has_begun_is_decided_by_its_fence(engine):
    """It may have been confirmed before the lease ended."""
    request = engine.arrive()
    engine.allocate(request, 9)
    engine.side._control._outbox.put([LeaseLost(RequestId("d-a")), LeaseLost(RequestId("gone"))], StatsReport())

    assert len(engine.orders()) == 1
    assert "loads_skipped_lease_lost" not in counters(engine)


@pytest.mark.parametrize(
    "hook",
    ["build_connector_meta", "on_new_request", "update_connector_output", "has_pending_push_work", "request_finished"],
)
def test_every_hook_shows_that_the_engines_loop_turns(engine, hook):
    """VLLM calls one of them whenever its loop turns."""
    engine.now += 500.0
    calls = {
        "build_connector_meta": lambda: engine.side.build_connector_meta(IDLE),
        "on_new_request": engine.arrive,
        "update_connector_output": lambda: engine.ended(),
        "has_pending_push_work": engine.side.has_pending_push_work,
        "request_finished": lambda: engine.side.request_finished(engine.request(), ([],)),
    }
    calls[hook]()

    assert engine.side._control._last_turn == engine.now


# ---- engines of other shapes


WINDOWED = (CacheGroup(SIZE), CacheGroup(SIZE, window=3))  # the last prompt token sees tokens 7 and 8, and itself


@pytest.fixture
def windowed():
    engine = Engine(groups=WINDOWED)
    yield engine
    engine.side.shutdown()


def test_of_a_sliding_window_only_the_blocks_that_the_last_token_sees_are_loaded(windowed):
    """Those before are not held on either side: 0 stands for them. VLLM caches the first one, which must be whole."""
    request = windowed.arrive(remote_block_ids=[[7, 8, 9], [0, 11, 12]])
    assert windowed.matched(request, 0) == (9, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3], [0, 4, 5]))
    windowed.side.update_state_after_alloc(request, blocks, 9)
    (order,) = windowed.orders()

    assert order.token_ranges == (TokenRange(0, 0, 9, (7, 8, 9), [1, 2, 3]), TokenRange(1, 4, 9, (11, 12), [4, 5]))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[7, 8, 9], [0, 0, 12]]},  # token 7 is in the second one
        {"remote_block_ids": [[0, 8, 9], [0, 11, 12]]},
        {"remote_block_ids": [[7, 8, 9], [0, 11]]},
        {"remote_block_ids": [[7, 8, 9]]},
        {"remote_block_ids": [[7, 8, 9], [0, 11, 12]], "pdrelay_block_sizes": [4]},
        {"remote_block_ids": [[7, 8], [11, 12]], "pdrelay_block_sizes": [8, 2]},
    ],
    ids=repr,
)
def test_an_offer_that_lacks_a_block_of_one_group_costs_a_local_prefill(windowed, change):
    """A block that is not held would be read as another request's."""
    request = windowed.arrive(**change)

    assert windowed.matched(request, 0) == (0, False)
    assert windowed.side.get_kv_connector_stats().data["counters"] == {"kv_params_invalid": 1}


def test_blocks_of_another_size_are_read_into_ours(engine):
    """The params hold P's block sizes."""
    request = engine.arrive(remote_block_ids=[[7, 8]], pdrelay_block_sizes=[8])
    blocks = engine.allocate(request, 5)  # the first block was in the local prefix cache
    (order,) = engine.orders()

    assert order.token_ranges == (TokenRange(0, 4, 9, (7, 8), [block.block_id for block in blocks[1:]]),)


def test_only_blocks_that_are_loaded_into_are_quarantined(windowed):
    """Nothing is written into the others."""
    request = windowed.arrive(remote_block_ids=[[7, 8, 9], [0, 11, 12]])
    blocks = windowed.pool.get_new_blocks(5)
    ids = [block.block_id for block in blocks]
    windowed.side.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids[:3], [0, *ids[3:]])), 5)
    windowed.ended("d-a", quarantined=["d-a"])
    windowed.pool.free_blocks(blocks)

    assert windowed.side.get_kv_connector_stats().data["gauges"]["blocks_quarantined"] == 4
    assert windowed.free() == BLOCKS - 1 - 4
    windowed.ended(released=["d-a"])
    assert windowed.free() == BLOCKS - 1


def test_of_each_group_the_prompts_blocks_are_lent_that_are_held(windowed):
    """With their sizes; blocks of the output are not leased."""
    request = windowed.request({"do_remote_decode": True}, name="p-a")
    blocks = windowed.pool.get_new_blocks(7)
    full = [block.block_id for block in blocks[:4]]
    window = [0, *(block.block_id for block in blocks[4:])]
    offer = parse_pull_params(windowed.side.request_finished(request, (full, window)))
    windowed.pool.free_blocks(blocks)

    assert offer.remote_block_ids == (tuple(full[:3]), tuple(window[:3]))
    assert offer.pdrelay_block_sizes == (SIZE, SIZE)
    assert windowed.free() == BLOCKS - 1 - 5


def test_a_prefill_that_is_aborted_lets_go_of_its_window(windowed):
    """No engine will read it."""
    request = windowed.request({"do_remote_decode": True}, name="p-a", status=RequestStatus.FINISHED_ABORTED)
    request.num_preemptions = 0
    windowed.side.on_new_request(request)
    blocks = windowed.pool.get_new_blocks(6)
    table = [block.block_id for block in blocks[:3]], [block.block_id for block in blocks[3:]]
    windowed.side.build_connector_meta(computing("p-a", 10, lambda own: table))
    assert windowed.side.request_finished(request, table) is None
    windowed.pool.free_blocks(blocks)

    assert windowed.free() == BLOCKS - 1


# ---- push


class RecordingWaker:
    """Notes each wait instead of waiting."""

    def __init__(self):
        self.waits = []
        self.while_waiting = lambda: None

    def wake(self):
        pass

    def wait(self, seconds):
        self.waits.append(seconds)
        self.while_waiting()


class PushEngine(Engine):
    """The same; what is asked of the control thread is only noted, and a test answers for it."""

    def __init__(self, **choices):
        super().__init__(**{"mode": Mode.PUSH} | choices)
        control = self.side._control
        control.stop()
        self.runner = control._runner
        control._runner = self
        self.side._waker = self.waker = RecordingWaker()
        self.asked, self.commands = [], []

    def post(self, command):
        self.commands.append(command)
        command(self, 0.0)

    def stop(self):
        self.runner.stop()

    def __getattr__(self, name):
        if name in ("lease_renewer", "push_receiver", "push_coordinator", "lease_manager"):
            return Asked(name, self.asked)
        raise AttributeError(name)

    def grant(self, request, *, now, sampled=False, pushed=True):
        self.asked.append(("grant", request))

    def arrive(self, *, name="d-a", **changes):
        request = self.request({**BOOKING, **changes}, name=name)
        request.status = RequestStatus.WAITING
        self.side.on_new_request(request)
        return request

    def prefill(self, name="p-a", transfer="t", **changes):
        request = self.request({"do_remote_decode": True, "transfer_id": transfer}, name=name, **changes)
        request.num_preemptions = 0
        self.side.on_new_request(request)
        return request

    def step(self, tokens=0, **scheduled):
        output = SimpleNamespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens=scheduled, kv_connector_block_state=None
        )
        return self.side.build_connector_meta(output)

    def tell(self, *news):
        self.side._control._outbox.put(news, StatsReport())

    def asks(self):
        asked = [(name, *args) for name, *args in self.asked]
        self.asked.clear()
        return asked


class Asked:
    """A part of the control thread: notes what is asked of it."""

    def __init__(self, part, asked):
        self.part, self.asked = part, asked

    def __getattr__(self, name):
        return lambda *args, **_: self.asked.append((f"{self.part}.{name}", *args))


BOOKING = {
    "do_remote_prefill": True, "remote_engine_id": "p0", "remote_host": "127.0.0.1", "remote_port": 1,
    "transfer_id": "t",
}  # fmt: skip


@pytest.fixture
def pushing():
    engine = PushEngine()
    yield engine
    engine.stop()


@pytest.fixture
def either():
    engine = PushEngine(mode=Mode.AUTO)
    yield engine
    engine.stop()


def test_an_engine_that_can_do_either_loads_as_each_request_says(either):
    """It registers blocks where it is told to, and reads what it is offered otherwise."""
    pushed = either.arrive(name="d-a", transfer_mode="push")
    pulled = either.request(offer(remote_request_id=RequestId("p-b")).to_params(), name="d-b")
    either.side.on_new_request(pulled)
    assert either.matched(pushed, 0) == either.matched(pulled, 0) == (9, True)
    either.allocate(pushed, 9)
    either.allocate(pulled, 9)

    assert [name for name, *_ in either.asks()].count("push_receiver.expect") == 1
    (order,) = either.step().orders
    assert (order.request, order.remote_request) == ("d-b", "p-b")


def test_routers_are_told_where_no_other_engine_may_go_on():
    """Both ways: streams move and are resumed in push as well."""
    engine = PushEngine(mode=Mode.AUTO, looks_back={"pdrelay_looks_back": True})
    asked = engine.request({"do_remote_decode": True, "transfer_id": "t-b", "transfer_mode": "push"}, name="p-b")
    asked.num_preemptions = 0
    engine.side.on_new_request(asked)
    said = [
        engine.side.request_finished(engine.prefill("p-a", "t-a"), ([1, 2, 3],)),
        engine.side.request_finished(asked, ([4, 5, 6],)),
    ]
    engine.side.shutdown()

    assert [params["transfer_mode"] for params in said] == ["pull", "push"]
    assert all(params["pdrelay_looks_back"] is True for params in said)


def test_an_engine_that_can_do_either_lends_as_each_request_says(either):
    """A router that says nothing gets an offer to read, as from an engine that pulls: it may be any."""
    either.side.request_finished(either.prefill("p-a", "t-a"), ([1, 2, 3],))
    asked = either.request({"do_remote_decode": True, "transfer_id": "t-b", "transfer_mode": "push"}, name="p-b")
    asked.num_preemptions = 0
    either.side.on_new_request(asked)
    params = either.side.request_finished(asked, ([4, 5, 6],))

    assert params["transfer_mode"] == "push"
    assert params["transfer_id"] == "t-b"
    (piece,) = either.step().pieces
    assert piece.request == "t-b"
    assert [request for name, request in either.asks() if name == "grant"] == ["p-a", "t-b"]


def test_a_request_to_be_pushed_that_cannot_is_not_offered_to_be_read(either):
    """Its decode engine waits for a push: what it is told instead, it would not read."""
    params = {"do_remote_decode": True, "transfer_id": "", "transfer_mode": "push"}
    either.side.on_new_request(request := either.request(params | {"transfer_id": "x" * 10_000}, name="p-a"))

    assert either.side.request_finished(request, ([1, 2, 3],)) is None


@pytest.mark.parametrize("changes", ["before it", "meanwhile"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_kv_of_an_adapter_that_has_changed_is_not_handed_over(either, mode, changes, tmp_path):
    """Blocks of the old weights are found by the adapter's name and path, whichever weights are there now."""
    folder = write_adapter(tmp_path / "a", seed=1)
    other = write_adapter(tmp_path / "b", seed=2)

    def prefill(name, changed=""):
        request = either.request({"do_remote_decode": True, "transfer_id": name, "transfer_mode": mode}, name=name)
        request.lora_request = lora(folder)
        request.num_preemptions = 0
        if changed == "before it":
            (other / "adapter_model.safetensors").replace(folder / "adapter_model.safetensors")
        either.side.on_new_request(request)
        if changed == "meanwhile":
            (other / "adapter_model.safetensors").replace(folder / "adapter_model.safetensors")
        return either.side.request_finished(request, ([block.block_id for block in either.pool.get_new_blocks(3)],))

    assert prefill("p-a") is not None
    assert prefill("p-b", changes) is None
    abandoned = [request for part, request in either.asks() if part == "push_coordinator.abandoned"]
    assert abandoned == (["p-b"] if mode == "push" else [])
    assert prefill("p-c") is None


def test_a_request_with_push_params_registers_its_blocks(pushing):
    """The transfer's name, the digest of its own prompt, and the blocks that are missing here."""
    request = pushing.arrive()
    assert [name for name, *_ in pushing.asks()] == ["lease_renewer.start_renewing"]
    assert pushing.matched(request, 4) == (5, True)
    blocks = pushing.allocate(request, 5)
    ((name, ticket),) = pushing.asks()
    pushing.allocate(request, 5)

    assert name == "push_receiver.expect"
    assert (ticket.request, ticket.remote_request, ticket.engine) == ("d-a", "t", "p0")
    assert ticket.groups == (LentBlocks(4, 9, tuple(block.block_id for block in blocks[1:])),)
    assert ticket.prompt == digest_prompt(PROMPT, [], None)
    assert pushing.asks() == []


def test_params_that_came_with_another_prompt_serve_their_own(pushing):
    """P compares the prompts, and refuses the first: the second must not take it for one that loads its prompt."""
    wrong = pushing.request(BOOKING, name="d-a", prompt=PROMPT[::-1])
    pushing.side.on_new_request(wrong)
    right = pushing.arrive(name="d-b")
    assert pushing.matched(wrong, 0) == (9, True)

    assert pushing.matched(right, 0) == (9, True)
    pushing.allocate(right, 9)
    assert [name for name, *_ in pushing.asks()].count("push_receiver.expect") == 1


def test_invalid_push_params_cost_a_local_prefill(pushing):
    """Never an exception."""
    request = pushing.arrive(transfer_mode="pull")

    assert pushing.matched(request, 0) == (0, False)
    assert pushing.asks() == []
    assert sum(pushing.side.get_kv_connector_stats().data["counters"].values()) == 1


def test_ended_pushes_reach_the_workers_once(pushing):
    """They report it to vLLM, and vLLM to us."""
    request = pushing.arrive()
    pushing.allocate(request, 9)
    pushing.tell(LoadResult(RequestId("d-a"), ""))
    assert pushing.side.has_pending_push_work()
    assert pushing.step().arrived == [LoadResult("d-a", "")]
    assert pushing.step().arrived == []
    pushing.ended("d-a")

    assert not pushing.side.has_pending_push_work()
    assert pushing.side.get_kv_connector_stats().data["gauges"]["requests_waiting_for_remote_kv"] == 0


def test_blocks_that_p_may_still_write_into_are_kept_from_others(pushing):
    """Pinned before the workers' report makes vLLM free them."""
    request = pushing.arrive()
    blocks = pushing.allocate(request, 9)
    pushing.side.request_finished(request, ([],))
    assert ("push_receiver.stop", "d-a") in pushing.asks()
    pushing.tell(LoadResult(RequestId("d-a"), "aborted", quarantined=True))
    pushing.step()
    pushing.side.update_connector_output(KVConnectorOutput(finished_recving={"d-a"}))
    pushing.pool.free_blocks(blocks)
    assert pushing.free() == BLOCKS - 1 - 3
    pushing.tell(BlocksReleased(RequestId("d-a")))
    pushing.step()

    assert pushing.free() == BLOCKS - 1


def test_a_request_that_is_aborted_in_the_queue_is_given_back(pushing):
    """Nothing was lent."""
    request = pushing.arrive()
    pushing.side.request_finished(request, ([],))

    assert ("lease_renewer.release", "d-a", "p0") in pushing.asks()


def test_a_finished_prefill_is_lent_under_its_transfers_name(pushing):
    """The workers receive its last blocks, even if the model computes nothing."""
    request = pushing.prefill()
    blocks = pushing.pool.get_new_blocks(4)
    ids = [block.block_id for block in blocks]
    params = pushing.side.request_finished(request, (ids,))
    pushing.pool.free_blocks(blocks)
    assert pushing.asks() == [("grant", "t")]
    assert pushing.side.has_pending_push_work()
    (piece,) = pushing.step().pieces

    assert (piece.request, piece.groups, piece.tokens, piece.last) == ("t", [ids[:3]], 10, True)
    assert (params["transfer_id"], params["transfer_mode"]) == ("t", "push")
    assert pushing.free() == BLOCKS - 1 - 3
    pushing.tell(LeaseEnded(RequestId("t"), LeaseEvent.DONE))
    pushing.step()
    assert pushing.free() == BLOCKS - 1


@pytest.mark.parametrize("is_held", [False, True], ids=["while the first runs", "while the first is held"])
def test_two_prefills_of_one_name_are_not_mixed_up(pushing, is_held):
    """The second is computed and not handed over."""
    first = pushing.prefill()
    if is_held:
        pushing.side.request_finished(first, ([block.block_id for block in pushing.pool.get_new_blocks(3)],))
    second = pushing.prefill(name="p-b")
    pushing.asks()

    assert pushing.side.request_finished(second, ([1, 2, 3],)) is None
    assert pushing.asks() == []
    assert pushing.side.get_kv_connector_stats().data["counters"] == {"transfer_ids_duplicate": 1}


def test_a_prefill_with_an_invalid_transfer_id_is_not_handed_over(pushing):
    """And the prefill goes on."""
    request = pushing.prefill(transfer=7)

    assert pushing.side.request_finished(request, ([1, 2, 3],)) is None
    assert pushing.asks() == []
    assert pushing.side.get_kv_connector_stats().data["counters"] == {"transfer_ids_invalid": 1}


def test_a_prefill_that_did_not_finish_is_abandoned(pushing):
    """Its decode engine learns it at once; its name is free again."""
    request = pushing.prefill(status=RequestStatus.FINISHED_ABORTED)
    assert pushing.side.request_finished(request, ([1, 2, 3],)) is None
    assert pushing.asks() == [("push_coordinator.abandoned", "t")]
    assert pushing.side.has_pending_push_work()  # for the workers
    pushing.prefill(name="p-b")

    assert "transfer_ids_duplicate" not in pushing.side._counters.take_report().counters


def test_a_prefill_beyond_what_may_be_held_is_abandoned():
    """Its decode engine computes the prompt itself."""
    engine = PushEngine(max_leases=1)
    for name in ("a", "b"):
        request = engine.prefill(name=name, transfer=name)
        engine.side.request_finished(request, ([block.block_id for block in engine.pool.get_new_blocks(3)],))
    engine.stop()

    assert engine.asks() == [("grant", "a"), ("push_coordinator.abandoned", "b")]


def test_an_engine_that_only_waits_for_pushes_waits_in_its_step(pushing):
    """vLLM would step it a thousand times a second; a push that ends meanwhile is reported in the same step."""
    request = pushing.arrive()
    pushing.allocate(request, 9)
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS  # as one that another connector loads
    pushing.waker.while_waiting = lambda: pushing.tell(LoadResult(RequestId("d-a"), ""))

    assert pushing.step().arrived == [LoadResult("d-a", "")]
    assert len(pushing.waker.waits) == 1


@pytest.mark.parametrize("why", ["running", "tokens", "arrived", "blocks", "pieces", "nothing"])
def test_an_engine_with_work_does_not_wait_in_its_step(pushing, why):
    """A step's output may be under way (asynchronous scheduling), or the workers wait for news."""
    if why != "nothing":
        pushing.allocate(pushing.arrive(), 9)
    if why == "running":
        pushing.arrive(name="d-b").status = RequestStatus.RUNNING
    if why == "arrived":
        pushing.tell(LoadResult(RequestId("d-a"), ""))
    if why == "pieces":
        request = pushing.prefill()
        pushing.side.request_finished(request, ([block.block_id for block in pushing.pool.get_new_blocks(3)],))
    if why == "blocks":
        pushing.side.handle_results = lambda: None
        pushing.tell(BlocksReleased(RequestId("d-a")))
    pushing.step(tokens=1 if why == "tokens" else 0)

    assert pushing.waker.waits == []


def test_an_engine_whose_other_connector_has_work_does_not_wait_in_its_step(pushing):
    """Inside MultiConnector: OffloadingConnector looks KV up and loads it step by step, and each would take 0.2 s."""
    pushing.allocate(pushing.arrive(), 9)
    other = pushing.request(name="d-b", status=RequestStatus.WAITING)
    pushing.side.on_new_request(other)
    pushing.matched(other, 0)
    pushing.step()

    assert pushing.waker.waits == []


def test_a_request_that_has_finished_does_not_keep_it_awake(pushing):
    """Otherwise one answer would cost a core for ever."""
    pushing.allocate(pushing.arrive(), 9)
    done = pushing.arrive(name="d-b")
    done.status = RequestStatus.RUNNING
    pushing.side.request_finished(done, ([],))
    pushing.step()

    assert len(pushing.waker.waits) == 1


@pytest.fixture
def lending():
    engine = Engine(prefix_hash="sha256")
    yield engine
    engine.side.shutdown()


def test_a_look_up_in_a_step_waits_for_that_step(lending):
    """VLLM has entered the blocks of the step into its prefix cache when the connector hears of the step."""
    step = SimpleNamespace(total_num_scheduled_tokens=4, num_scheduled_tokens={}, kv_connector_block_state=None)
    (block,) = lending.pool.get_new_blocks(1)
    lending.pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(b"hash", 0), block)
    lending.side._control._outbox.put([PrefixLookup(Question(ConnId(1), RequestId("r")), [b"hash"])], StatsReport())

    number = lending.side.build_connector_meta(step).number

    assert (number, len(lending.side._cached._pinned)) == (1, 1)
    lending.side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=WorkerMetadata(step=number)))
    assert len(lending.side._cached._pinned) == 0


def test_steps_have_no_number_where_nothing_is_lent(engine):
    """Workers then report nothing with them."""
    step = SimpleNamespace(total_num_scheduled_tokens=4, num_scheduled_tokens={}, kv_connector_block_state=None)

    assert engine.side.build_connector_meta(step).number == 0


def steps(engine):
    """The events of one report, without their times."""
    report = engine.side.get_kv_connector_stats()
    return [] if report is None else [(each[0], str(each[1]), each[3]) for each in report.data["events"]]


def computing(name, tokens, resolve=None):
    """Return a step that computes so many tokens of a request; ``resolve`` returns its blocks."""
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={name: tokens},
        kv_connector_block_state=resolve and SimpleNamespace(resolve_block_ids=resolve),
        has_sync_kv_loads=False,
    )


@pytest.fixture
def noting(monkeypatch):
    """An engine whose API server shows timelines."""
    monkeypatch.setenv("VLLM_PLUGINS", "pdrelay,pdrelay_timelines")
    engine = Engine()
    yield engine
    engine.side.shutdown()


def test_the_timeline_of_a_load_names_each_step(noting):
    """In the order in which vLLM calls the hooks; a request is considered once, however often vLLM asks."""
    request = noting.arrive()
    noting.matched(request, 0)
    noting.matched(request, 0)
    noting.allocate(request, 9)
    noting.side.build_connector_meta(computing("d-a", 1))
    request.num_output_tokens = 1
    noting.side.build_connector_meta(IDLE)
    noting.side.request_finished(request, ((),))

    assert [each for each in steps(noting) if "lease" not in each[1]] == [
        ("d-a", "arrived", 0), ("d-a", "queued", 0), ("d-a", "considered", 0), ("d-a", "load_ordered", 9),
        ("d-a", "computing", 1), ("d-a", "first_token", 0), ("d-a", "finished", 1),
    ]  # fmt: skip


def test_the_first_handshake_with_an_engine_has_an_end_in_the_timeline(noting):
    """Before it, vLLM allocates nothing: it would be taken for the time until there are blocks."""
    request = noting.arrive(remote_engine_id="p1")
    assert noting.matched(request, 0) == (None, False)
    assert noting.matched(request, 0) == (None, False)
    noting.side._decodes.handshake_ended(HandshakeEnded(EngineId("p1")))
    noting.matched(request, 0)
    noting.allocate(request, 9)

    assert [step for _, step, _ in steps(noting)] == ["arrived", "queued", "considered", "peer_met", "load_ordered"]


def test_the_events_of_a_timeline_are_dated(monkeypatch):
    """By the wall clock, whatever the other one shows."""
    monkeypatch.setenv("VLLM_PLUGINS", "pdrelay,pdrelay_timelines")
    engine = Engine(clock=lambda: 5000.0)
    engine.arrive()
    report = engine.side.get_kv_connector_stats()
    engine.side.shutdown()

    assert [each[2] for each in report.data["events"]] == [4990.0, 5000.0]


def test_without_the_route_nothing_is_noted(engine):
    """Nobody could read it."""
    engine.arrive()

    assert steps(engine) == []


def peer_loads(engine):
    return engine.side.get_kv_connector_stats().data["peer_loads"]


def test_a_load_is_counted_for_its_prefill_engine_when_all_ranks_have_it(engine):
    """One rank may have a network that others lack; it counts its failure itself."""
    for name in ("d-a", "d-b"):
        engine.allocate(engine.arrive(name=name, remote_request_id=f"p-{name}"), 10)
    engine.orders()
    output = KVConnectorOutput(finished_recving={"d-a", "d-b"}, failed_recving={"d-b"})
    engine.side.update_connector_output(output)

    assert peer_loads(engine) == {"p0": {"loaded": 1}}


def test_a_prefill_engine_that_cannot_be_reached_or_refuses_is_named(engine):
    """The router learns it from the metrics: the text is right, whoever has computed the prompt."""
    for peer in ("p1", "p2"):
        request = engine.arrive(name=f"d-{peer}", remote_engine_id=peer)
        ended = {"failure": "timed out"} if peer == "p1" else {"objection": "another secret", "cause": "secret"}
        engine.side._decodes.handshake_ended(HandshakeEnded(EngineId(peer), is_final=False, **ended))
        if peer == "p1":
            engine.allocate(request, 10)
    engine.side.build_connector_meta(IDLE)
    engine.side.update_connector_output(KVConnectorOutput(finished_recving={"d-p1"}, failed_recving={"d-p1"}))

    report = engine.side.get_kv_connector_stats().data
    assert report["peer_loads"] == {"p1": {"handshake": 1}, "p2": {"secret": 1}}
    assert report["failures"] == {"p1": "handshake", "p2": "secret"}


def test_an_engine_with_another_secret_is_named_by_its_offers(monkeypatch):
    """They are refused before it is met: nothing but D's log said why not one byte moved."""
    monkeypatch.setenv("VLLM_PLUGINS", "pdrelay,pdrelay_timelines")
    engine = Engine(secrets=(SECRET,))
    engine.side.on_new_request(engine.request(offer().to_params() | {"do_remote_prefill": True}))
    report = engine.side.get_kv_connector_stats().data
    engine.side.shutdown()

    assert report["peer_loads"] == {"p0": {"secret": 1}}
    assert report["failures"] == {"p0": "secret"}
    assert [event[4] for event in report["events"] if event[1] == "load_failed"] == ["secret"]


def test_blocks_of_a_sampled_prefill_are_ordered_from_the_workers_and_their_sums_reach_the_lease():
    """The order goes with the next step, even of an idle engine; until the sums are there the fence waits."""
    engine = Engine(verify_share=1.0, verify_blocks=2)
    request = engine.request({"do_remote_decode": True}, name="p-a")
    blocks = [block.block_id for block in engine.pool.get_new_blocks(3)]
    engine.side.request_finished(request, (blocks,))
    assert engine.side.has_pending_push_work()
    sampled = engine.side.build_connector_meta(IDLE).sampled
    assert not engine.side.has_pending_push_work()

    assert {name: {each.block for each in its} <= set(blocks) for name, its in sampled.items()} == {"p-a": True}
    assert [len(its) for its in sampled.values()] == [2]
    sums = {RequestId("p-a"): [RankSums(0, "s", ())]}
    engine.side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=WorkerMetadata(sums=sums)))
    settle(engine)

    assert engine.side._control._runner._core.lease_manager._sampled["p-a"].sums_of(0) == RankSums(0, "s", ())
    assert counters(engine)["prefills_sampled"] == 1


@pytest.fixture
def sleeping():
    """An engine with a loop, which sleeps until something is in its input queue."""
    engine = Engine(input_queue=queue.Queue())
    yield engine
    engine.side.shutdown()


def test_numbers_that_nothing_follows_wake_an_idle_engine(sleeping):
    """VLLM collects them with a step: what was counted of strangers would be seen when somebody else came, or never."""
    with socket.create_connection(("127.0.0.1", sleeping.port)) as stranger:
        stranger.sendall(b"no hello")
    woken, _ = sleeping.side._waker._queue.get(timeout=60)

    assert woken is EngineCoreRequestType.WAKEUP
    assert sleeping.side.has_pending_push_work()
    sleeping.side.build_connector_meta(IDLE)
    assert sum(counters(sleeping).values()) > 0


def compare_two_pushes(pushing):
    """Have the workers find the push of d-a right, and that of d-b wrong."""
    for name, failed in (("d-a", set()), ("d-b", {"d-b"})):
        pushing.allocate(pushing.arrive(name=name, transfer_id=f"t-{name}"), 9)
        pushing.tell(LoadResult(RequestId(name), "", checks=LoadChecks(EngineId("p0"), (), ())))
        pushing.step()
        pushing.side.update_connector_output(KVConnectorOutput(finished_recving={name}, failed_recving=failed))


def test_a_compared_push_counts_once_when_all_ranks_have_compared_it(pushing):
    """Not before: the control thread does not know yet. Nor on each rank: it is one load that has failed."""
    compare_two_pushes(pushing)
    report = pushing.side._counters.take_report()

    assert (report.counters["loads"], report.counters["loads_failed_wrong_kv"]) == (1, 1)
    assert report.peer_loads == {"p0": {"loaded": 1, "wrong_kv": 1}}


def test_the_timeline_of_a_push_that_arrived_wrong_says_so(monkeypatch):
    """It ends when the workers have compared it, and not as loaded."""
    monkeypatch.setenv("VLLM_PLUGINS", "pdrelay,pdrelay_timelines")
    engine = PushEngine()
    try:
        compare_two_pushes(engine)
        found = [(name, step) for name, step, _ in steps(engine) if step in ("loaded", "load_failed")]
    finally:
        engine.stop()

    assert found == [("d-a", "loaded"), ("d-b", "load_failed")]
