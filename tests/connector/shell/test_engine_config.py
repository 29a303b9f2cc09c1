"""What an engine is refused for at its start: it would fail under load, or answer from the wrong KV."""

import dataclasses
import warnings
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        CrossAttentionSpec,
        FullAttentionSpec,
        HiddenStateCacheSpec,
        SinkFullAttentionSpec,
        SlidingWindowMLASpec,
    )

    from pdrelay_connector.shell import vllm_versions
    from pdrelay_connector.shell.devices import check_copies, check_events, computed
    from pdrelay_connector.shell.engine_config import (
        EngineConfig,
        _check_contexts,
        _check_stages,
        _prefix_hash,
        read_engine_config,
    )
    from pdrelay_connector.shell.supported_caches import check_supported

from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.errors import SettingsError, UnsupportedCache
from pdrelay_connector.settings import Mode, Settings

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
PLAIN_SPEC = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
SHAPE = {"block_size": 32, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
RING = CircularBufferSpec(**SHAPE)
COPIES = SimpleNamespace(insert_blocks_to_device=print, swap_out_blocks_to_host=print)


def config(*, sleep=False, experts=False, dcp=1, pcp=1, tp=1):
    parallel = SimpleNamespace(
        decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp, tensor_parallel_size=tp
    )
    switches = SimpleNamespace(enable_return_routed_experts=experts)
    model = SimpleNamespace(enable_sleep_mode=sleep)
    return SimpleNamespace(parallel_config=parallel, model_config=model, aux_output_config=switches)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"staging_blocks": 8}, "host staging"), ({"groups": (CacheGroup(4, state="x"),)}, "a model that keeps a state")],
)
def test_pipeline_stages_have_limits(changes, kind):
    """Each stage stages, and keeps states, for itself: no test shows that these parts fit together."""
    plain = EngineConfig(
        EngineId("p"), Address("127.0.0.1", 1), (CacheGroup(4),), {}, 9, all_heads=1, ranks=1,
        is_producer=True, is_consumer=True, stages=2,
    )  # fmt: skip
    _check_stages(plain)
    _check_stages(dataclasses.replace(plain, stages=1, **changes))
    with pytest.raises(UnsupportedCache, match=f"pipeline_parallel_size is 2; with {kind} only 1 is supported"):
        _check_stages(dataclasses.replace(plain, **changes))


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (
            {"kv_cache_spec": SimpleNamespace()},
            r"layer l\.0 .* of kind SimpleNamespace; supported are Full",
        ),
        (
            {"kv_cache_spec": FullAttentionSpec(**SHAPE, tokens_per_state=Fraction(1, 4))},
            r"layer l\.0 keeps several entries for a token \(tokens_per_state is 1/4\)",
        ),
        (
            {"kv_cache_spec": CrossAttentionSpec(**SHAPE)},
            r"layer l\.0 .* of kind CrossAttentionSpec \(its KV is of the encoder.*\); supported are Full",
        ),
        (
            {"kv_cache_spec": SinkFullAttentionSpec(**SHAPE, sink_len=32)},
            r"layer l\.0 .* of kind SinkFullAttentionSpec \(its kernel keeps static sinks",
        ),
        (
            {"kv_cache_spec": HiddenStateCacheSpec(**SHAPE)},
            r"layer l\.0 .* of kind HiddenStateCacheSpec \(it keeps hidden states",
        ),
        ({"host_resident": True}, r"layer l\.0 has a KV cache in host memory \(host_resident\)"),
        ({"enable_kv_transfer": False}, r"layer l\.0 .* out of transfers \(enable_kv_transfer is off\)"),
    ],
)
def test_a_cache_that_does_not_move_is_refused_with_its_own_reason(group, says):
    """A connector that took it would move too much, or nothing."""
    plain = {"kv_cache_spec": PLAIN_SPEC, "layer_names": ["l.0"], "enable_kv_transfer": True, "host_resident": False}
    check_supported(config(), SimpleNamespace(kv_cache_groups=[SimpleNamespace(**plain)]))
    with pytest.raises(UnsupportedCache, match=says):
        check_supported(config(), SimpleNamespace(kv_cache_groups=[SimpleNamespace(**(plain | group))]))


@pytest.mark.parametrize("kind", ["ring", "replayed window"])
def test_before_a_version_asks_what_is_loaded_rings_and_replayed_windows_are_refused(monkeypatch, kind):
    """vLLM would zero what the load fills, or compute over it."""
    if kind == "replayed window" and "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__:
        pytest.skip("this version has no replayed windows")
    spec = RING if kind == "ring" else SlidingWindowMLASpec(**SHAPE, sliding_window=64, bounded_replay=True)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["l.0"], enable_kv_transfer=True, host_resident=False)
    monkeypatch.setattr(vllm_versions, "ASKS_WHAT_IS_LOADED", True)
    check_supported(config(), SimpleNamespace(kv_cache_groups=[group]))
    monkeypatch.setattr(vllm_versions, "ASKS_WHAT_IS_LOADED", False)
    with pytest.raises(UnsupportedCache, match=r"layer l\.0 keeps a ring of tokens or a replayed window, and vLLM"):
        check_supported(config(), SimpleNamespace(kv_cache_groups=[group]))


@pytest.mark.parametrize(
    ("role", "sizes", "says"),
    [
        ("kv_both", {"pcp": 2}, "prefill_context_parallel_size is 2 and kv_role is kv_both; .* only kv_producer is"),
        ("kv_consumer", {"pcp": 2}, "kv_role is kv_consumer"),
        ("kv_producer", {"pcp": 2, "dcp": 4, "tp": 2}, "size 4 and tensor_parallel_size 2; the first two must be"),
        ("kv_producer", {"pcp": 2, "dcp": 2, "tp": 2}, "and with both the third must be 1"),
        ("kv_producer", {"pcp": 2}, None),
        ("kv_producer", {"pcp": 2, "tp": 4}, None),
        ("kv_producer", {"pcp": 4, "dcp": 4}, None),
    ],
)
def test_prefill_contexts_are_taken_where_vllms_own_connector_takes_them(monkeypatch, role, sizes, says):
    """D would be told of some of its workers only."""
    monkeypatch.setattr(vllm_versions, "DIVIDES_CONTEXTS", True)
    asked = config(**sizes)
    asked.kv_transfer_config = SimpleNamespace(kv_role=role, is_kv_consumer=role != "kv_producer")
    with nullcontext() if says is None else pytest.raises(UnsupportedCache, match=says):
        check_supported(asked, SimpleNamespace(kv_cache_groups=[]))


def test_ranks_divide_a_context_where_vllm_says_of_which_caches(monkeypatch):
    """Taken for whole, a part of a cache would be a wrong text with status 200."""
    monkeypatch.setattr(vllm_versions, "DIVIDES_CONTEXTS", True)
    check_supported(config(dcp=2), SimpleNamespace(kv_cache_groups=[]))
    monkeypatch.setattr(vllm_versions, "DIVIDES_CONTEXTS", False)
    for name in ("decode", "prefill"):
        with pytest.raises(UnsupportedCache, match=rf"{name}_context_parallel_size is 2; with vLLM .* vLLM 0\.32"):
            check_supported(config(**{f"{name[0]}cp": 2}), SimpleNamespace(kv_cache_groups=[]))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"stages": 2}, "pipeline stages"),
        ({"staging_blocks": 8}, "host staging"),
        ({"tokens_per_entry": {"l.0": 2}}, "compressed vectors"),
        (
            {"groups": (CacheGroup(8, window=5, shards=2),)},
            "a window, a chunk, a ring or a state that ranks share",
        ),
        ({"groups": (CacheGroup(8, chunk=8, shards=2),)}, "a window, a chunk, a ring or a state that ranks share"),
        (
            {"groups": (CacheGroup(8, state="x", is_ring=True, shards=2),)},
            "a window, a chunk, a ring or a state that ranks share",
        ),
        (
            {"groups": (CacheGroup(8, forgets_answers=True, shards=2),)},
            "a window, a chunk, a ring or a state that ranks share",
        ),
    ],
)
def test_what_was_not_tried_with_divided_contexts_is_refused(changes, kind):
    """Each sentence names it; without it, and beside it where all ranks keep everything, the engine starts."""
    divided = EngineConfig(
        EngineId("p"), Address("127.0.0.1", 1), (CacheGroup(8, shards=2), CacheGroup(4, window=5)), {}, 9, all_heads=1,
        ranks=2, is_producer=True, is_consumer=True, shards=2,
    )  # fmt: skip
    _check_contexts(divided)
    _check_contexts(dataclasses.replace(divided, shards=1, **changes))
    with pytest.raises(UnsupportedCache, match=f"decode_context_parallel_size is 2; with {kind}"):
        _check_contexts(dataclasses.replace(divided, **changes))
    with pytest.raises(UnsupportedCache, match=f"prefill_context_parallel_size is 4; with {kind}"):
        _check_contexts(dataclasses.replace(divided, shards=1, contexts=4, **changes))


def test_an_engine_that_may_sleep_is_refused_where_no_hook_tells_of_it():
    """vLLM 0.32 lets it start; awake again, its cache is elsewhere, and NIXL's registrations are not."""
    check_supported(config(), SimpleNamespace(kv_cache_groups=[]))
    with (
        nullcontext()
        if vllm_versions.FOLLOWS_SLEEP
        else pytest.raises(UnsupportedCache, match=r"enable_sleep_mode is on.*need vLLM 0\.33 or later")
    ):
        check_supported(config(sleep=True), SimpleNamespace(kv_cache_groups=[]))


def test_an_engine_that_returns_routed_experts_is_refused():
    """Where a version has the switch; D would return those of other prompts for what it has loaded."""
    with pytest.raises(UnsupportedCache, match="enable_return_routed_experts is on"):
        check_supported(config(experts=True), SimpleNamespace(kv_cache_groups=[]))
    earlier = config()
    del earlier.aux_output_config
    earlier.model_config.enable_return_routed_experts = True
    with pytest.raises(UnsupportedCache, match="enable_return_routed_experts is on"):
        check_supported(earlier, SimpleNamespace(kv_cache_groups=[]))


@pytest.mark.parametrize("device", ["cuda", "xpu", "cpu"])
def test_devices_with_streams_and_events_are_taken(device):
    """As far as torch knows of them; whether there is one, vLLM has found out before."""
    check_copies(device, COPIES)
    check_events(device)


@pytest.mark.parametrize("device", ["npu", "tpu"])
def test_devices_without_events_cannot_push(device):
    """There is no sign that a part of a prompt is computed."""
    with pytest.raises(UnsupportedCache, match=f"torch has no events for '{device}' .* must be \"pull\" there"):
        check_events(device)


def test_a_device_that_vllm_cannot_copy_is_refused():
    """The first request would fail, and every one after it."""
    with pytest.raises(UnsupportedCache, match="'mps' cannot go through host memory: there is no streams for"):
        check_copies("mps", COPIES)
    with pytest.raises(
        UnsupportedCache, match="no insert_blocks_to_device and no swap_out_blocks_to_host for that device"
    ):
        check_copies("xpu", current_platform if current_platform.is_cpu() else SimpleNamespace())


def test_a_host_copies_and_computes_by_itself():
    """Its operations have ended when they return."""
    check_copies("cpu", SimpleNamespace())

    assert computed(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("mla", "ranks", "number", "expected"), [(False, 1, 0, (4, True, 7000)), (True, 2, 1, (1, False, 7001))]
)
def test_what_vllm_says_of_an_engine(monkeypatch, mla, ranks, number, expected):
    """MLA's vectors are alike on all ranks, each data-parallel rank listens for itself, and none may delay others."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "7000")
    made = config()
    made.kv_transfer_config = SimpleNamespace(
        engine_id="p", kv_connector="PDRelayConnector", kv_connector_extra_config={}, is_kv_producer=True,
        is_kv_consumer=True, kv_buffer_device=current_platform.device_type,
    )  # fmt: skip
    made.parallel_config = SimpleNamespace(
        data_parallel_index=number, data_parallel_size=ranks, tensor_parallel_size=2, pipeline_parallel_size=1,
        decode_context_parallel_size=1, prefill_context_parallel_size=1,
    )  # fmt: skip
    made.model_config = SimpleNamespace(
        use_mla=mla, get_total_num_kv_heads=lambda: 4, enable_sleep_mode=False, max_model_len=64,
        logits_processors=None, get_diff_sampling_param=dict, hf_config=SimpleNamespace(model_type="llama"),
    )  # fmt: skip
    made.structured_outputs_config = SimpleNamespace(reasoning_parser="")
    found, _ = read_engine_config(made, SimpleNamespace(kv_cache_groups=[], num_blocks=9))

    assert (found.all_heads, found.steps_independently, found.address.port) == expected


def returning(**transfer):
    """An engine that can lend its prefix cache, but for what is changed."""
    fields = {"is_kv_producer": True, "is_kv_consumer": True, "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**fields | transfer),
        speculative_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
    )


FULL = (CacheGroup(16),)


@pytest.mark.parametrize("mode", Mode)
def test_an_engine_that_returns_kv_knows_its_hash(mode):
    assert _prefix_hash(returning(), Settings(return_kv=True, mode=mode), FULL) == "sha256"
    assert _prefix_hash(returning(), Settings(return_kv="auto", mode=mode), FULL) == "sha256"
    assert _prefix_hash(returning(), Settings(), FULL) == ""


@pytest.mark.parametrize(
    ("transfer", "choices", "groups", "reason"),
    [
        ({"is_kv_producer": False, "kv_role": "kv_consumer"}, {}, FULL, "kv_role is kv_consumer, not kv_both"),
        ({}, {}, (*FULL, *FULL), "the model has several KV cache groups"),
        ({}, {}, (CacheGroup(16, window=64),), "its layers do not keep all tokens"),
        ({}, {}, (CacheGroup(16, state="x"),), "its layers do not keep all tokens"),
        ({}, {}, (CacheGroup(16, forgets_answers=True),), "its layers do not keep all tokens"),
        ({}, {"host_staging": True, "mode": Mode.PUSH}, FULL, "KV is pushed through host memory"),
        ({}, {}, (CacheGroup(16, shards=2),), "ranks divide a context among them"),
        ({}, {"host": "0.0.0.0"}, FULL, "no address that others can dial"),
    ],
)
def test_what_was_not_tried_with_return_kv_is_refused(transfer, choices, groups, reason):
    """A window or a state that is read for the wrong token is a wrong text with status 200."""
    with pytest.raises(SettingsError, match=reason):
        _prefix_hash(returning(**transfer), Settings(return_kv=True, **choices), groups)
    assert _prefix_hash(returning(**transfer), Settings(return_kv="auto", **choices), groups) == ""  # it starts without


def test_drafts_and_engines_without_a_prefix_cache_are_refused():
    drafting, uncached = returning(), returning()
    drafting.speculative_config = object()
    uncached.cache_config.enable_prefix_caching = False

    for engine in (drafting, uncached):
        with pytest.raises(SettingsError, match="switch return_kv off"):
            _prefix_hash(engine, Settings(return_kv=True), FULL)
