"""The worker half without NIXL: what the forward thread does with the transfer thread's news."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch

    from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank
    from pdrelay_connector.shell.metadata import StepMetadata, WorkerMetadata
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker

from pdrelay_connector.core.counters import StatsReport
from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import BlockSum, RankSums
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.push_job import ComputedBlocks
from pdrelay_connector.core.results import BlocksReleased, LoadChecks, LoadResult
from pdrelay_connector.core.verify.sampling import SampledBlock
from pdrelay_connector.errors import ConnectorError
from pdrelay_connector.settings import Settings

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
ADDRESS = Address("127.0.0.1", 1)


class Thread:
    """Stands where the transfer thread would be."""

    def __init__(self):
        self.posted = []
        self.dead = False
        self.busy_s = 0.0  # in its present turn

    def post(self, command):
        self.posted.append(command)

    def check(self):
        if self.dead:
            raise ConnectorError("thread pdrelay-transfer died")


@pytest.fixture
def worker():
    groups = (CacheGroup(4),)
    engine_config = EngineConfig(
        EngineId("d"), ADDRESS, groups, {"l.0": 0}, 10, all_heads=1, ranks=1, is_producer=True, is_consumer=True
    )
    worker = PDRelayConnectorWorker(engine_config, Settings(), WorkerRank(0))
    worker._threads.reader = Thread()  # registering a cache would start the real one, and NIXL
    return worker


def load(worker, *names):
    whole = (TokenRange(0, 0, 4, [1], [2]),)
    orders = [LoadOrder(RequestId(name), RequestId("p"), EngineId("p"), ADDRESS, whole) for name in names]
    worker.start_load_kv(StepMetadata(orders, idle=True))


def tell(worker, *news):
    worker._outbox.put(news, StatsReport())


def test_failed_loads_are_reported_as_received_too(worker):
    """vLLM takes a request out of its waiting state by the one, and recomputes it by the other."""
    load(worker, "a", "b")
    tell(worker, LoadResult(RequestId("a"), ""), LoadResult(RequestId("b"), "no route"))
    results = worker.get_transfer_results()

    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"b"})
    assert worker.build_connector_worker_meta() is None


def test_quarantined_blocks_are_reported_in_the_step_of_the_failure(worker):
    """A step later vLLM would have given them to another request."""
    load(worker, "a")
    tell(worker, LoadResult(RequestId("a"), "not loaded", quarantined=True))
    assert worker.get_transfer_results().failed_recving == {"a"}
    assert worker.build_connector_worker_meta() == WorkerMetadata([RequestId("a")], [])
    tell(worker, BlocksReleased(RequestId("a")))
    assert worker.get_transfer_results().finished_recving == set()

    assert worker.build_connector_worker_meta() == WorkerMetadata([], [RequestId("a")])
    assert worker.build_connector_worker_meta() is None


def test_loads_fail_when_a_call_of_nixl_does_not_return(worker, caplog):
    """Nothing else would end them. What the call may still write into is nobody's until it is over."""
    load(worker, "a", "b")
    worker._threads.reader.busy_s = Settings().transfer_timeout + 1
    results = worker.get_transfer_results()
    load(worker, "later")

    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"a", "b"})
    assert worker.build_connector_worker_meta() == WorkerMetadata([RequestId("a"), RequestId("b")], [])
    assert worker.get_transfer_results().failed_recving == {"later"}
    counters = worker.get_kv_connector_stats().data["counters"]
    assert (counters["transfer_thread_stuck"], counters["loads_failed_timeout"]) == (1, 3)
    assert sum("has not returned" in record.message for record in caplog.records) == 1


def test_a_call_that_returns_after_all_frees_the_blocks_and_ends_no_load_twice(worker):
    """Whatever it says of them, vLLM has computed these prompts."""
    load(worker, "read", "failed", "hangs")
    worker._threads.reader.busy_s = Settings().transfer_timeout + 1
    worker.get_transfer_results()
    worker.build_connector_worker_meta()
    worker._threads.reader.busy_s = 0.0
    ends = LoadResult(RequestId("read"), ""), LoadResult(RequestId("failed"), "no route")
    tell(worker, *ends, LoadResult(RequestId("hangs"), "not loaded", quarantined=True))
    results = worker.get_transfer_results()

    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert worker.build_connector_worker_meta() == WorkerMetadata([], [RequestId("read"), RequestId("failed")])
    tell(worker, BlocksReleased(RequestId("hangs")))
    worker.get_transfer_results()
    assert worker.build_connector_worker_meta() == WorkerMetadata([], [RequestId("hangs")])


def test_what_is_loaded_when_the_call_has_returned_is_loaded(worker):
    worker._threads.reader.busy_s = Settings().transfer_timeout + 1
    load(worker, "a")
    worker.get_transfer_results()
    worker._threads.reader.busy_s = 0.0
    load(worker, "b")
    tell(worker, LoadResult(RequestId("b"), ""))
    results = worker.get_transfer_results()

    assert (results.finished_recving, results.failed_recving) == ({"b"}, set())


def test_an_engine_that_takes_nothing_over_says_so(worker):
    """A bug of ours, not a request that waits."""
    worker._threads.reader = None

    with pytest.raises(RuntimeError, match="no consumer in pull"):
        load(worker, "a")


def offer(worker, *names):
    worker.add_computed([ComputedBlocks(RequestId(name), None, 0, [[1]], 4, last=True) for name in names])


class Core:
    """Stands where the writer would be."""

    def __init__(self):
        self.offered = []

    def add_computed(self, piece, *, now, ready):
        self.offered.append((piece.request, now, ready))


def test_pieces_are_offered_to_the_thread_that_writes(worker):
    """In order; on a CPU they are ready at once."""
    worker._threads.writer, core = Thread(), Core()
    offer(worker, "a", "b")
    for command in worker._threads.writer.posted:
        command(core, 5.0)

    assert core.offered == [("a", 5.0, None), ("b", 5.0, None)]


class Event:
    """One of a device that has not got so far."""

    def __init__(self):
        self.is_recorded = False

    def record(self):
        self.is_recorded = True

    def query(self):
        return not self.is_recorded


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_pieces_wait_for_their_device_whatever_it_is_called(worker, monkeypatch, device):
    """What its kernels have not written yet would be another prompt's KV, with status 200."""
    monkeypatch.setattr(torch, "get_device_module", {device: SimpleNamespace(Event=Event)}.__getitem__)
    worker._threads.writer, worker._memory, core = Thread(), SimpleNamespace(device=torch.device(device)), Core()
    offer(worker, "a")
    worker._threads.writer.posted[0](core, 5.0)
    ((_, _, ready),) = core.offered

    assert ready() is False


def test_pieces_for_an_engine_that_lends_nothing_are_a_bug(worker):
    """The decode engine would wait for ever."""
    with pytest.raises(ConnectorError, match="no producer in push"):
        offer(worker, "a")


@pytest.mark.parametrize("name", ["reader", "writer", "stager"])
def test_a_thread_that_has_died_stops_the_engine(worker, name):
    """Loads of this engine or of others would wait for it, in silence."""
    thread = Thread()
    thread.dead = True
    setattr(worker._threads, name, thread)

    with pytest.raises(ConnectorError, match="died"):
        worker.get_transfer_results()


def test_what_the_scheduler_knows_to_have_arrived_is_reported_once(worker):
    """In push the workers only pass results on; the scheduler keeps the quarantine."""
    a, b = LoadResult(RequestId("a"), ""), LoadResult(RequestId("b"), "aborted", quarantined=True)
    worker.start_load_kv(StepMetadata(arrived=[a]))
    worker.start_load_kv(StepMetadata(arrived=[b], idle=True))
    results = worker.get_transfer_results()

    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"b"})
    assert worker.build_connector_worker_meta() is None
    assert worker.get_transfer_results().finished_recving == set()


class Cache:
    """Stands where the registered cache would be: each block has the checksum that it is given."""

    shape = "whole"

    def __init__(self, sums):
        self.sums = sums
        self.cache, self.producer = self, SimpleNamespace(info=SimpleNamespace(worker=0))
        self.consumer = self.producer

    def block_size(self, group):
        return 4

    def checksum(self, group, block, start, stop):
        return self.sums[block]


def arrived(worker, *crcs, shape="whole"):
    """Take in a push of two blocks, which P says have these checksums."""
    blocks = tuple(BlockSum(0, 4 * place, 4 * place + 4, crc) for place, crc in enumerate(crcs))
    checks = LoadChecks(EngineId("p"), (RankSums(0, shape, blocks),), [TokenRange(0, 0, 8, (), [7, 8])])
    worker.start_load_kv(StepMetadata(arrived=[LoadResult(RequestId("a"), "", checks=checks)]))
    return worker.get_transfer_results(), worker.get_kv_connector_stats().data


def test_a_push_is_compared_before_vllm_hears_of_its_end(worker):
    """Only the worker reaches the blocks; a wrong one is a failed load."""
    worker._memory = Cache({7: 70, 8: 80})
    results, report = arrived(worker, 70, 80)
    assert (results.finished_recving, results.failed_recving) == ({"a"}, set())
    assert report["counters"] == {"blocks_checked": 2}
    results, report = arrived(worker, 70, 81)

    assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
    assert report["counters"] == {"blocks_checked": 2, "blocks_wrong": 1}  # the scheduler counts the load, once


def test_a_push_of_another_shape_is_not_compared(worker):
    """And used: its checksums are of other bytes."""
    worker._memory = Cache({7: 70, 8: 80})
    results, report = arrived(worker, 1, 2, shape="another")

    assert results.failed_recving == set()
    assert report["counters"] == {"loads_unchecked": 1}


def test_checksums_of_finished_prefills_go_to_the_scheduler_with_the_step(worker):
    """Which passes them on to those who read the blocks."""
    worker._memory = Cache({7: 70, 8: 80})
    worker.take_sums({RequestId("p-a"): (SampledBlock(0, 8, 4, 8),)})

    assert worker.build_connector_worker_meta().sums == {"p-a": [RankSums(0, "whole", (BlockSum(0, 4, 8, 80),))]}
    assert worker.build_connector_worker_meta() is None


def test_a_worker_whose_cache_has_no_reader_answers_without_checksums(worker):
    """Those who read the blocks need not wait; what a push brings is used."""
    worker._memory = Cache({})
    worker._memory.cache = None
    worker.take_sums({RequestId("p-a"): (SampledBlock(0, 8, 4, 8),)})
    assert worker.build_connector_worker_meta().sums == {"p-a": [RankSums(0, "", ())]}
    results, report = arrived(worker, 1, 2)

    assert results.failed_recving == set()
    assert report["counters"] == {"loads_unchecked": 1}


def test_checksums_of_all_ranks_add_up():
    """The readers of each get those of its counterpart."""
    one, other = (WorkerMetadata(sums={RequestId("a"): [RankSums(rank, "s", ())]}) for rank in (0, 1))

    assert one.aggregate(other).sums == {"a": [RankSums(0, "s", ()), RankSums(1, "s", ())]}
