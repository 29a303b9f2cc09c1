"""What vLLM's own configuration says of an engine, as an API server has it: from it routers know whom to pair."""

import warnings

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.fingerprint import info_labels

from pdrelay_tools.local.model import TinyModel, ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two directories: no name of the hub is asked for."""
    paths = [tmp_path_factory.mktemp("models") / name for name in ("target", "draft")]
    for path in paths:
        ensure_model(path)
    return paths


@pytest.fixture
def model(models):
    return models[0]


@pytest.fixture
def draft(models):
    return models[1]


@pytest.fixture
def make(model):
    """Return what makes an engine's configuration, without the engine."""

    def make(mode="pull", role="kv_both", model=model, max_model_len=128, **choices):
        transfer = KVTransferConfig(
            kv_connector="PDRelayConnector", kv_connector_module_path="pdrelay_connector", kv_role=role,
            kv_connector_extra_config={"mode": mode},
        )  # fmt: skip
        return EngineArgs(
            model=str(model), kv_transfer_config=transfer, enforce_eager=True, max_model_len=max_model_len, **choices
        ).create_engine_config()

    return make


def test_a_prefill_and_a_decode_engine_of_other_sizes_are_alike(make):
    """Everything that may differ between the pools stays out."""
    prefill = info_labels(make(role="kv_producer", block_size=32, gpu_memory_utilization=0.1))
    decode = info_labels(make(role="kv_consumer", block_size=64, max_num_seqs=7))

    assert prefill == decode
    assert prefill["fingerprint"] != info_labels(make(kv_cache_dtype="fp8"))["fingerprint"]
    assert prefill["fingerprint"] == info_labels(make(max_model_len=256, max_num_batched_tokens=256))["fingerprint"]
    assert prefill["fingerprint"] != info_labels(make(hf_overrides={"rms_norm_eps": 1e-3}))["fingerprint"]


def test_a_model_by_another_path_is_the_same_and_a_fine_tune_is_not(make, model, tmp_path):
    """As vLLM reads both: one shape, one path for two models, two paths for one."""
    (tmp_path / "cache").symlink_to(model)
    ensure_model(tmp_path / "tuned", TinyModel(seed=1))

    assert info_labels(make(model=tmp_path / "cache")) == info_labels(make())
    assert info_labels(make(model=tmp_path / "tuned")) != info_labels(make())


def test_a_draft_model_is_noticed_and_n_grams_are_not(make, draft):
    """As vLLM reads a speculative configuration; the one's layers have KV."""
    plain = info_labels(make())
    n_grams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}

    assert info_labels(make(speculative_config=n_grams)) == plain
    assert info_labels(make(speculative_config=drafts)) != plain


def test_the_labels_are_in_the_metrics_before_anything_has_happened(make):
    """An API server registers them while it starts."""
    before = set(REGISTRY._collector_to_names)
    config = make(mode="push")
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    PDRelayConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    labels = {"model_name": "m", "engine": "0", "engine_id": config.kv_transfer_config.engine_id, **info_labels(config)}
    labels["kv_role"] = "kv_both"
    try:
        assert labels["mode"] == "push"
        assert REGISTRY.get_sample_value("vllm:pdrelay_connector_info", labels) == 1
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)
