"""The facts about vLLM that the connector is built on. A new vLLM that changes one of them fails here first."""

import dataclasses
import inspect
import queue
import threading
import time
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config import KVTransferConfig, ModelConfig, SpeculativeConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu_worker import Worker

    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.engine_waker import EngineWaker, find_engine_waker
    from pdrelay_connector.shell.sleep_hooks import before_sleeps, find_executor

from pdrelay_connector.errors import ConnectorError, UnsupportedCache

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
LONG = 20.0  # s: more than anything here takes


def test_sleep_mode_is_allowed_as_vllm_0_33_asks():
    """On the class, with the connector's configuration."""
    assert PDRelayConnector.supports_sleep_mode(KVTransferConfig()) is True


@pytest.mark.skipif(not vllm_versions.FOLLOWS_SLEEP, reason="this vLLM tells no connector of a sleep")
@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("sleep", ["unregister_kv_caches()", "backend.suspend("]),
        ("discard", ["unregister_kv_caches()", "backend.discard("]),
        ("wake_up", ["backend.resume(", "restore_kv_caches()"]),
    ],
)
def test_a_worker_lets_go_of_the_memory_before_it_goes_and_registers_it_when_it_is_back(method, calls):
    """In the other order NIXL would hold pages that are gone, or register none."""
    source = inspect.getsource(getattr(Worker, method))

    assert [source.index(call) for call in calls] == sorted(source.index(call) for call in calls)


@pytest.mark.skipif(not vllm_versions.FOLLOWS_SLEEP, reason="this vLLM tells no connector of a sleep")
def test_the_engine_core_resets_its_cache_then_asks_its_executor_and_passes_the_workers_words_on():
    """The scheduler's connector hears of a sleep through the executor (shell/sleep_hooks.py), and of its end so."""
    sleep, wake = inspect.getsource(EngineCore.sleep), inspect.getsource(EngineCore.wake_up)

    assert sleep.index("clear_cache=clear_prefix_cache") < sleep.index("model_executor.sleep(level)")
    assert wake.index("model_executor.wake_up(tags)") < wake.index("self._set_kv_connector_handshake_metadata()")
    assert "self.model_executor.discard" in inspect.getsource(EngineCore.release_kv_cache_memory)
    assert "self.sleeping_tags |= SLEEP_TAGS" in inspect.getsource(Executor.sleep)


def test_the_executor_is_found_on_the_stack_that_builds_the_scheduler():
    """The engine core has it before it makes its scheduler, and so our connector; without an engine nothing sleeps."""
    init = inspect.getsource(EngineCore.__init__)
    assert init.index("self.model_executor = ") < init.index("self.scheduler: SchedulerInterface = Scheduler(")

    class Core(EngineCore):
        def __init__(self, executor):
            self.model_executor = executor
            self.found = find_executor()

    executor = Dozing(goes=True)
    assert Core(executor).found is executor
    with pytest.raises(UnsupportedCache, match="no engine of vLLM that could sleep"):
        find_executor()


class Dozing:
    """An executor as the engine core has one."""

    def __init__(self, *, goes):
        self.sleeping_tags = set()
        self.goes = goes

    def sleep(self, level=1):
        if self.goes == "fails":
            raise RuntimeError("a worker has failed")
        self.sleeping_tags |= {"kv_cache"} if self.goes else set()

    def discard(self, tags):
        self.sleeping_tags |= set(tags)


@pytest.mark.parametrize(("goes", "heard"), [(True, ["let go"]), (False, ["let go", "go on"])])
def test_the_scheduler_hears_of_a_sleep_before_it_and_goes_on_if_the_memory_stays(goes, heard):
    """As where vLLM finds that the weights sleep already."""
    executor = Dozing(goes=goes)
    said = []
    before_sleeps(executor, lambda: said.append("let go"), lambda: said.append("go on"))
    executor.sleep(1)
    executor.discard(("scheduling",))

    assert said == heard


def test_who_cannot_let_go_keeps_all_workers_awake():
    """A worker that has put its memory away beside one that has not is an engine that is lost."""
    executor = Dozing(goes=True)
    said = []

    def prepare():
        raise ConnectorError("a push may still be written")

    before_sleeps(executor, prepare, lambda: said.append("go on"))
    for put_away in (executor.sleep, lambda: executor.discard(("kv_cache",))):
        with pytest.raises(ConnectorError):
            put_away()

    assert (executor.sleeping_tags, said) == (set(), [])


def test_the_scheduler_goes_on_if_a_worker_fails():
    """VLLM passes the error on, and the engine may be resumed."""
    executor = Dozing(goes="fails")
    said = []
    before_sleeps(executor, lambda: None, lambda: said.append("go on"))
    with pytest.raises(RuntimeError):
        executor.sleep(1)

    assert said == ["go on"]


def test_what_decides_the_kv_is_called_so():
    """The fingerprint is made of it, and in an API server nothing else would notice."""
    model = {field.name for field in dataclasses.fields(ModelConfig)}
    speculative = {field.name for field in dataclasses.fields(SpeculativeConfig)}

    assert {"revision", "code_revision", "quantization", "enable_sleep_mode"} <= model
    assert {"method", "kv_cache_dtype", "parallel_drafting", "draft_model_config"} <= speculative
    assert callable(SpeculativeConfig.uses_draft_kv_cache)


def test_everything_abstract_is_implemented():
    """Otherwise the engine does not start."""
    assert PDRelayConnector.__abstractmethods__ == frozenset()
    assert supports_hma(PDRelayConnector)


def test_a_worker_reports_ends_in_these_fields():
    """A failed load is in two of them."""
    names = {field.name for field in dataclasses.fields(base.KVConnectorTransferResults)}

    assert names == {"finished_sending", "finished_recving", "failed_recving"}
    assert {"finished_recving", "failed_recving", "kv_connector_worker_meta"} <= {
        field.name for field in dataclasses.fields(KVConnectorOutput)
    }


def test_pinned_blocks_stay_out_of_the_pool():
    """touch adds a holder, free_blocks takes one away; ``blocks`` is indexed by block id."""
    pool = BlockPool(8, enable_caching=False, hash_block_size=4)
    blocks = pool.get_new_blocks(3)
    free = pool.get_num_free_blocks()
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == free
    pool.free_blocks(reversed(blocks))

    assert pool.get_num_free_blocks() == free + 3
    assert [block.block_id for block in pool.blocks] == list(range(8))


def test_the_engine_can_be_woken():
    """Through the queue that its constructor makes before it builds the scheduler, and with it the connector."""
    source = inspect.getsource(EngineCoreProc.__init__)

    assert isinstance(EngineCoreRequestType.WAKEUP, EngineCoreRequestType)
    assert source.index("self.input_queue = ") < source.index("super().__init__(")
    assert "WAKEUP" in inspect.getsource(EngineCoreProc._handle_client_request)


def test_the_door_is_that_of_the_engine_that_builds_us():
    """On the stack, however deep."""
    engine = EngineCoreProc.__new__(EngineCoreProc)
    engine.input_queue = queue.Queue()
    door = build_under(engine)
    door.wake()

    assert door.is_open
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def build_under(self):
    def connector():
        return find_engine_waker()

    return connector()


def test_without_an_engine_process_there_is_no_door():
    """Offline inference: the caller's own thread runs the engine."""
    door = find_engine_waker()
    door.wake()
    door.wait(LONG)

    assert not door.is_open


def test_the_input_queue_is_one_that_can_be_waited_for():
    """``Door.wait`` looks behind ``queue.Queue``: at its deque and its condition."""
    source = inspect.getsource(EngineCoreProc.__init__)

    assert "self.input_queue = queue.Queue" in source
    assert {"not_empty", "queue"} <= vars(queue.Queue()).keys()


def test_a_wait_for_a_queued_item_returns_at_once():
    """A request that came before the nap would otherwise sleep as long."""
    box = queue.Queue()
    door = EngineWaker(box)
    door.wake()
    began = time.monotonic()
    door.wait(LONG)

    assert time.monotonic() - began < LONG / 2
    assert box.qsize() == 1, "it is for the engine to take"


def test_a_knock_and_a_request_end_a_wait():
    """From another thread."""
    for put in (lambda box: EngineWaker(box).wake(), lambda box: box.put_nowait("request")):
        box = queue.Queue()
        timer = threading.Timer(0.05, put, [box])
        timer.start()
        began = time.monotonic()
        EngineWaker(box).wait(LONG)
        timer.join()

        assert time.monotonic() - began < LONG / 2
        assert box.qsize() == 1


def test_a_wait_ends_by_itself():
    """The nap is short, so that nothing that does not knock is late by more."""
    began = time.monotonic()
    EngineWaker(queue.Queue()).wait(0.05)

    assert 0.04 < time.monotonic() - began < LONG / 2
