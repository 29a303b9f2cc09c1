"""smg, which was SGLang's router: Rust, from PyPI, with vLLM as its backend."""

from interop.peer import Pair, Peer
from interop.programs import environment, version_of


def argv(pair: Pair) -> list[object]:
    """One policy for both roles."""
    port, metrics = pair.ports
    words = ["launch", "--pd-disaggregation", "--backend", "vllm", "--policy", "round_robin", "--host", "127.0.0.1"]
    words += ["--prefill", pair.prefill.base_url, "none", "--decode", pair.decode.base_url]
    return [environment("smg") / "smg", *words, "--port", port, "--prometheus-port", metrics]


NOTHING = (
    "Before engines of vLLM that serve HTTP it drops `kv_transfer_params`: D computes every prompt. "
    "`vllm:pdrelay_requests_without_kv_params` on D counts them."
)
CAUSES = {
    "equal": "It takes no token ids as a prompt (400). All others are equal.",
    "moved": NOTHING,
    "errors": "A model that is not served is a 503.",
    "P returns": NOTHING,
}
PEER = Peer("smg", "smg", version_of("smg", "smg"), argv, causes=CAUSES)
