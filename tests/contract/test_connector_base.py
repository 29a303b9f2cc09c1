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
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.engine_waker import EngineWaker, find_engine_waker

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
LONG = 20.0  # s: more than anything here takes
OURS = sorted(
    name for name, member in vars(PDRelayConnector).items() if inspect.isroutine(member) and not name.startswith("__")
)

NEWER = {"supports_sleep_mode"}  # vLLM 0.33 asks


def parameters(cls, name):
    return list(inspect.signature(getattr(cls, name)).parameters)


@pytest.mark.parametrize("name", sorted(set(OURS) - NEWER))
def test_every_method_overrides_one_of_vllms_with_the_same_parameters(name):
    """A method that vLLM renamed would never be called again, in silence."""
    cls = next(cls for cls in (KVConnectorBase_V1, base.SupportsHMA) if hasattr(cls, name))

    assert parameters(PDRelayConnector, name) == parameters(cls, name)


def test_sleep_mode_is_refused_as_vllm_0_33_asks():
    """On the class, with the connector's configuration; its own answer would be yes, and peers would write anywhere."""
    assert PDRelayConnector.supports_sleep_mode(KVTransferConfig()) is False
    if hasattr(KVConnectorBase_V1, "supports_sleep_mode"):
        assert parameters(PDRelayConnector, "supports_sleep_mode") == parameters(
            KVConnectorBase_V1, "supports_sleep_mode"
        )


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


def test_a_worker_is_asked_for_its_metadata_after_its_results():
    """The news that blocks linger must come with the failure, not a step after it."""
    source = inspect.getsource(KVConnectorModelRunnerMixin)

    assert source.index("get_transfer_results(") < source.index("build_connector_worker_meta(")


def test_metadata_is_bound_before_the_forward_and_loads_start_after_it():
    """What is pushed must travel while the model computes, so it starts with the first of the two."""
    source = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    forward = source.index("yield output")

    assert source.index("bind_connector_metadata(") < forward < source.rindex("start_load_kv(")


def test_the_scheduler_tells_us_before_it_frees_blocks():
    """What lingers is pinned in update_connector_output: later would be too late."""
    source = inspect.getsource(Scheduler._update_from_kv_xfer_finished)

    assert source.index("update_connector_output(") < source.index("_free_blocks(")


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
