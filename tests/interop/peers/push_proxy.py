"""vLLM's example of a proxy for connectors that push: it is told P's coordinates, and asks both engines at once."""

from interop.peer import Pair, Peer
from interop.programs import VLLM, environment, vllm_sources
from pdrelay_tools.local.recipe import EngineSpec
from support.cluster import MODEL_NAME

FILE = "examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py"


def config(spec: EngineSpec) -> dict[str, object]:
    """As vLLM's documentation starts an engine that pushes, but for the path."""
    return {
        "kv_connector": "NixlPushConnector",
        "kv_connector_module_path": "pdrelay_connector.nixl",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "engine_id": spec.name,
    }


def argv(pair: Pair) -> list[object]:
    """P's identity and side channel."""
    prefill = pair.prefill
    words = ["--model", MODEL_NAME, "--prefill", prefill.address, "--decode", pair.decode.address]
    words += ["--prefill-engine-id", prefill.name, "--prefill-kv-host", prefill.side_channel_host]
    words += ["--prefill-side-channel-port", prefill.side_channel_port]
    return [environment("demo-proxies") / "python", vllm_sources() / FILE, *words, "--port", pair.ports[0]]


CAUSES = {
    "errors": "It answers 200 before it asks an engine: the engine's error is the body of a 200. A body that is "
    "no JSON is a 500.",
}
PEER = Peer(
    "push-proxy", "vLLM's `disagg_proxy_pushconnector_demo`", VLLM, argv, health="/status", config=config, causes=CAUSES
)
