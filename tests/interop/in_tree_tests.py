"""What vLLM's own tests of P/D demand, and whether it holds for our connector under the name of vLLM's."""

VLLM = "0.32.0"
INTRODUCTION = f"""\
The tests of vLLM {VLLM} (`tests/v1/kv_connector`) were run by hand on CPUs, outside of this repository, with our
module behind the name `NixlConnector`. Of 763 unit tests 708 pass as they are, and 753 with vLLM's own connector, where
what is missing wants the model hub, Ray or a GPU. But most of them build `NixlConnectorScheduler` or
`NixlConnectorWorker`, and so say nothing of another connector. The table has those that ask vLLM's scheduler or
engines. Some leave out what an engine does, so they were run a second time, **completed**: the workers' handshakes are
passed on, as `EngineCore` does; a P of ours is there, holds the lease, and its parameters have all fields; `kv_role` is
`kv_both`, for the tests give `kv_consumer` to P, too; a state has one dtype for each of its tensors.

```sh
# engines as its run_edge_case_test.sh starts them (and P at 8001), then its own test
VLLM_NIXL_SIDE_CHANNEL_PORT=6000 vllm serve MODEL --port 8002 --enforce-eager --kv-transfer-config \\
  '{{"kv_connector":"NixlConnector","kv_connector_module_path":"pdrelay_connector.nixl","kv_role":"kv_both"}}'
python toy_proxy_server.py --port 8192 --prefiller-ports 8001 --decoder-ports 8002
PREFILL_PORT=8001 DECODE_PORT=8002 PROXY_PORT=8192 pytest test_edge_cases.py
# the unit tests, with KVConnectorFactory.get_connector_class made to set the same kv_connector_module_path
pytest tests/v1/kv_connector/unit
```
"""
ROWS = (
    (
        "`test_edge_cases`, through `toy_proxy_server`",
        "the text is one engine's: a prompt shorter than a block, one that D has, one that D has in part",
        "yes, with SmolLM2-135M-Instruct",
        "`e2e/test_equality.py`",
    ),
    (
        "`test_disagg_accuracy`",
        "texts of a completion and of a chat are one engine's",
        "yes, with SmolLM2-135M-Instruct",
        "`e2e/test_equality.py`",
    ),
    (
        "`test_accuracy`",
        "at most 0.05 below the known share of right answers to gsm8k",
        "not run: its questions are on the hub, and SmolLM2 has no known share",
        "more is shown: [100 of 100 texts](real-model.md#seen) equal one engine's",
    ),
    (
        "`test_multi_connector_edge_cases`",
        "as `test_edge_cases`; `vllm:nixl_bytes_transferred` grows; D counts where each token of a prompt is from",
        "5 of 9, with SmolLM2-135M-Instruct, `nixl_metrics`, and ExampleConnector in the place of OffloadingConnector, "
        "which does not start on a CPU. Three want all tokens of a prompt as loaded: of ours D computes the last one, "
        "35 + 1 of 36. One wants numbers of OffloadingConnector; its texts are equal",
        "`e2e/test_multi_connector.py`, `e2e/test_offloading.py`",
    ),
    (
        "`test_mamba_prefix_cache`",
        "a prompt of a hybrid model that D has in part moves fewer bytes the second time",
        "not run: its model is on the hub",
        "`models/test_states.py`, `contract/test_state_blocks.py`",
    ),
    (
        "`test_spec_decode_acceptance`",
        "D accepts as many drafts as one engine",
        "not run: its models are on the hub, and want a GPU",
        "with drafts from n-grams [100 of 100 texts](real-model.md#seen) are equal",
    ),
    (
        "`test_remote_decode_lifecycle`",
        "P keeps the blocks of a finished prompt, also short and cached ones, until they are read, also if it is "
        "aborted; then nothing is left",
        "0 of 4: they find the blocks at the finished request, which vLLM keeps for its connector. Ours pins blocks, "
        "and the request ends",
        "`contract/test_request_lives.py`",
    ),
    (
        "`test_remote_prefill_lifecycle`",
        "D waits for KV with blocks that no other request finds, others go on, full blocks are cached afterwards; too "
        "few blocks delay and do not hang; an abort leaves nothing; states; reservations of vLLM's scheduler",
        "3 of 16; completed 14. `test_basic_lifecycle` wants 40 of 40 tokens loaded: ours loads 39, because vLLM "
        "computes the last one anyway. `test_cannot_schedule_after_recv` wants a load that takes the last blocks: ours "
        "[waits](connector.md#scheduler-and-engine-loop) until one is left for the next token",
        "`contract/test_request_lives.py`, `connector/shell/test_block_shortage.py`",
    ),
    (
        "`test_nixl_connector`, 6 tests with a scheduler",
        "a D that rejects a request frees P's blocks; P says what it had cached; a prompt shorter than a block is "
        "loaded",
        "0 of 6; completed 1. The others look into `NixlConnectorMetadata`",
        "`contract/test_request_lives.py`; what P had cached is vLLM's scheduler's to say",
    ),
    (
        "`test_abort_timeout_on_prefiller`",
        "blocks that no D reads are free after `kv_lease_duration`",
        "0 of 1, with a model of ours: it looks for the blocks at the finished request; the other one wants Ray",
        "`chaos/test_decode_engine.py`",
    ),
    (
        "`test_bidirectional_kv_transfer`, 21 tests with a scheduler",
        "D returns parameters with its answer, and P reads the blocks they name for the next turn",
        "0 of 21: ours does it without such parameters ([KV of answers](kv-back.md)). "
        "P ignores them and computes the prompt",
        "`e2e/test_kv_back.py`",
    ),
    (
        "`test_nixl_simple_cpu_offload`",
        "in `MultiConnector` the connector that is listed first and has the prompt loads it",
        "3 of 4; of the other one all but the class of the metadata",
        "`contract/test_multi_connector.py`, `e2e/test_multi_connector.py`",
    ),
    (
        "`test_kv_load_failure_recovery`, `test_invalid_blocks_correctness`, `test_error_propagation`, "
        "`test_cache_pollution_prevention`",
        "a load that fails is computed or ends in an error, as `kv_load_failure_policy` says; no wrong block is cached",
        "20 of 20; they put another connector in its place",
        "`chaos/test_prefill_engine.py`, `connector/shell/test_failed_loads.py`",
    ),
    (
        "`test_multi_connector`, `test_config`, `test_hma_auto_config`, `test_kv_connector_lifecycle`, "
        "`test_output_aggregator`, `test_scheduler_kv_connector_override`, `test_handshake_pp_aggregation`",
        "what vLLM does with any connector",
        "55 of 57, as with vLLM's: one wants the hub, one a GPU",
        "`contract/test_connector_base.py`, `contract/test_multi_connector.py`",
    ),
    (
        "`test_nixl_heartbeat`, `test_nixl_push_connector`, `test_nixl_connector_hma`, `test_nixl_desc_geometry`, "
        "`test_tp_mapping`, `test_transfer_topology_sharded`, the rest of `test_nixl_connector`",
        "methods and tables of `NixlConnectorScheduler`, `NixlConnectorWorker` and their push variants",
        "nothing is asked of ours",
        "renewals `connector/core/lease`, push `connector/core/push`, cache kinds "
        "`connector/shell/test_cache_kinds.py` (with vLLM's own plan beside ours), unequal shapes `e2e/test_shapes.py`",
    ),
)


def section() -> str:
    """Return the section of the page."""
    lines = [("there", "what it demands", "holds with ours", "shown here by"), ("---",) * 4, *ROWS]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## vLLM's own tests\n\n{INTRODUCTION}\n{table}\n"
