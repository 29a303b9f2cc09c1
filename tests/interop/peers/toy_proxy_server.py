"""The proxy of vLLM's own tests of NIXL."""

from interop.peer import Pair, Peer
from interop.programs import VLLM, environment, vllm_sources

FILE = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"


def argv(pair: Pair) -> list[object]:
    """Hosts and ports apart."""
    words = ["--prefiller-hosts", pair.prefill.host, "--prefiller-ports", pair.prefill.port]
    words += ["--decoder-hosts", pair.decode.host, "--decoder-ports", pair.decode.port]
    return [environment("demo-proxies") / "python", vllm_sources() / FILE, *words, "--port", pair.ports[0]]


CAUSES = {
    "errors": "It raises an engine's error as its own, a 500. P is asked for one token whatever the client wants, so a "
    "wrong `max_tokens` is D's to refuse, and then the response has begun: the connection breaks.",
}
PEER = Peer("toy-proxy", "vLLM's `toy_proxy_server`", VLLM, argv, health="/healthcheck", causes=CAUSES)
