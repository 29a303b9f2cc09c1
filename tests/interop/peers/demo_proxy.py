"""vLLM's example of a proxy for connectors that find each other by themselves."""

from interop.peer import Pair, Peer
from interop.programs import VLLM, environment, vllm_sources
from support.cluster import MODEL_NAME

FILE = "examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py"


def argv(pair: Pair) -> list[object]:
    """It must be told the model."""
    words = ["--model", MODEL_NAME, "--prefill", pair.prefill.address, "--decode", pair.decode.address]
    return [environment("demo-proxies") / "python", vllm_sources() / FILE, *words, "--port", pair.ports[0]]


NOTHING = "It asks P without `kv_transfer_params`, for connectors that find each other by themselves: D computes all."
CAUSES = {
    "moved": NOTHING,
    "P returns": NOTHING,
    "errors": "It answers 200 before it asks an engine: the engine's error is the body of a 200.",
}
PEER = Peer("demo-proxy", "vLLM's `disagg_proxy_demo`", VLLM, argv, health="/status", causes=CAUSES)
