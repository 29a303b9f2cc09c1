"""The proxy of vLLM-Ascend, which its documentation of P/D starts."""

from interop.peer import Pair, Peer
from interop.programs import environment, repository

COMMIT = "182b75ea84ff13ece27b57391331ef8935410aea"  # of 2026-08-22
FILE = "examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py"


def argv(pair: Pair) -> list[object]:
    """Hosts and ports apart."""
    words = ["--prefiller-hosts", pair.prefill.host, "--prefiller-ports", pair.prefill.port]
    words += ["--decoder-hosts", pair.decode.host, "--decoder-ports", pair.decode.port, "--host", "127.0.0.1"]
    source = repository("https://github.com/vllm-project/vllm-ascend", COMMIT)
    return [environment("demo-proxies") / "python", source / FILE, *words, "--port", pair.ports[0]]


CAUSES = {
    "errors": "It answers 200 before it asks D, so that what D alone refuses (a wrong `max_tokens`) is a 200 with an "
    "error in it; a body that is no JSON is a 500.",
}
PEER = Peer(
    "ascend-proxy",
    "vLLM-Ascend's `load_balance_proxy_server_example`",
    f"`{COMMIT[:8]}`",
    argv,
    health="/healthcheck",
    causes=CAUSES,
)
