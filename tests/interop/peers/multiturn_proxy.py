"""vLLM's example of a proxy for chats, in which KV goes back to P."""

from interop.peer import Pair, Peer
from interop.programs import VLLM, environment, vllm_sources

FILE = "examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py"


def argv(pair: Pair) -> list[object]:
    """One engine of each role."""
    words = ["--prefiller-host", pair.prefill.host, "--prefiller-port", pair.prefill.port]
    words += ["--decoder-host", pair.decode.host, "--decoder-port", pair.decode.port, "--host", "127.0.0.1"]
    return [environment("demo-proxies") / "python", vllm_sources() / FILE, *words, "--port", pair.ports[0]]


WRITTEN = (
    "It always asks D for a stream, and writes whole answers anew out of it: without logprobs and usage, and with one "
    "choice in which the texts of all are mixed. What it streams is equal."
)
CAUSES = {
    "equal": WRITTEN,
    "n = 2": WRITTEN,
    "arrays": WRITTEN,
    "errors": "It raises an engine's error as its own, a 500.",
}
PEER = Peer("multiturn-proxy", "vLLM's `disagg_proxy_multiturn`", VLLM, argv, causes=CAUSES)
