"""What vLLM's MultiConnector wants of the connectors in it, and what ours takes it to do."""

import inspect
import warnings
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from support.engines import FINGERPRINT, changed, rank_info

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.engine.arg_utils import EngineArgs

    from pdrelay_connector.shell import plugin
    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.fingerprint import with_model
    from pdrelay_connector.shell.metadata import RankHandshake
    from pdrelay_connector.shell.vllm_stats import PDRelayStats

from pdrelay_connector.core.counters import StatsReport
from pdrelay_connector.errors import UnsupportedCache
from pdrelay_tools.local.model import ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
OURS = {"kv_connector": "PDRelayConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
BY_PATH = {**OURS, "kv_connector_module_path": "pdrelay_connector"}
BY_ANOTHER_NAME = {**OURS, "kv_connector": "NixlPushConnector", "kv_connector_module_path": "pdrelay_connector.nixl"}
STATS = StatsReport(counters={"loads": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    ensure_model(path)
    return path


def transfer(*connectors):
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(connectors)},
    )


def test_the_name_is_enough():
    """The entry point is installed; vLLM may call it more than once in a process."""
    (entry,) = entry_points(group="vllm.general_plugins", name="pdrelay")
    register = entry.load()
    register()
    register()

    assert register is plugin.register
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**OURS)) is PDRelayConnector


def test_with_a_module_path_the_name_is_known_too():
    """An API server rebuilds a child's stats by its class's name alone; without it, it died at the first request."""
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**BY_PATH)) is PDRelayConnector
    assert KVConnectorFactory.get_connector_class_by_name(PDRelayConnector.__name__) is PDRelayConnector


def test_our_numbers_pass_through_it():
    """From one process to another as plain data, under the class's name."""
    there = MultiConnector.build_kv_connector_stats({"PDRelayConnector": PDRelayStats(STATS).to_dict()})
    here = MultiConnector.build_kv_connector_stats({"PDRelayConnector": PDRelayStats(STATS)})
    both = there.aggregate(here)

    assert both.reduce() == {"PDRelayConnector": {"loads": 6}}


@pytest.mark.parametrize("connectors", [(OURS, EXAMPLE), (EXAMPLE, BY_PATH), (EXAMPLE, BY_ANOTHER_NAME)])
def test_our_metrics_and_our_layout_in_any_order(model, connectors):
    """With the labels of our own configuration, not of MultiConnector's, and never taken for numbers of vLLM's own."""
    before = set(REGISTRY._collector_to_names)
    config = EngineArgs(
        model=str(model), kv_transfer_config=transfer(*connectors), enforce_eager=True, max_model_len=128
    ).create_engine_config()
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    try:
        metrics = MultiConnector.build_prom_metrics(config, types, ["model_name"], {0: ["m"]})
        metrics.observe({"PDRelayConnector": PDRelayStats(STATS).to_dict()})

        assert REGISTRY.get_sample_value("vllm:pdrelay_loads_total", {"model_name": "m"}) == 3
        assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)


class Child:
    """Stands where a connector would be, and says how many tokens it has."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.given = None

    def get_num_new_matched_tokens(self, request, computed):
        return self.tokens, self.tokens > 0

    def update_state_after_alloc(self, request, blocks, external):
        self.given = external


def multi(*children):
    made = MultiConnector.__new__(MultiConnector)
    made._connectors = list(children)
    made._requests_to_connector = {}
    return made


def test_one_connector_loads_and_the_others_hear_of_none():
    """The first that has any; 0 is when ours gives the lease back, so that P does not wait for a reader."""

    class Request:
        request_id = "r"

    first = Child(0)
    second = Child(40)
    third = Child(60)
    connector = multi(first, second, third)

    assert connector.get_num_new_matched_tokens(Request, 0) == (40, True)
    connector.update_state_after_alloc(Request, None, 40)
    assert (first.given, second.given, third.given) == (0, 40, 0)


def test_offloading_has_what_we_tell_it():
    """Which blocks a step allocates, for its copies to end before; and how many tokens of a request it copies."""
    step = inspect.getsource(OffloadingConnectorScheduler)
    copies = inspect.getsource(OffloadingConnectorScheduler._calc_num_offloadable_tokens)

    assert "in self._current_batch_allocated_block_ids" in step
    assert "req_status.max_offload_tokens" in copies
    assert isinstance(OffloadingConnector.scheduler, property)
    assert isinstance(MultiConnector.sub_connectors, property)


def test_one_connector_describes_this_engine_to_others():
    """The first; who gets another's description must say so instead of dying of an empty one."""

    class Theirs(KVConnectorHandshakeMetadata):
        pass

    ours = PDRelayConnector.__new__(PDRelayConnector)
    with pytest.raises(UnsupportedCache, match="only one of NixlConnector, PDRelayConnector"):
        multi(ours).set_xfer_handshake_metadata_pp_aware({(0, 0): Theirs()})


def test_workers_of_all_pipeline_stages_are_known(model):
    """VLLM names them by stage and tensor-parallel rank; peers compare what the model is, too."""
    started = []
    ours = PDRelayConnector.__new__(PDRelayConnector)
    ours._fingerprint = None
    ours._scheduler = SimpleNamespace(start=lambda ranks, fingerprint: started.append((ranks, fingerprint)))
    ours._vllm_config = EngineArgs(model=str(model), enforce_eager=True, max_model_len=128).create_engine_config()
    places = [(stage, rank) for stage in range(2) for rank in range(2)]
    handshakes = {
        (stage, rank): RankHandshake(info, info, FINGERPRINT)
        for stage, rank in places
        for info in [changed(rank_info("p", rank=rank, ranks=2), stage=stage, stages=2)]
    }
    multi(ours).set_xfer_handshake_metadata_pp_aware(handshakes)

    ((ranks, fingerprint),) = started
    assert ranks == {2 * stage + rank: handshakes[stage, rank] for stage, rank in places}
    assert fingerprint == with_model(FINGERPRINT, ours._vllm_config)
