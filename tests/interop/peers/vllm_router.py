"""vllm-router: Rust, from PyPI, with its documented command line for P/D."""

from interop.peer import Pair, Peer
from interop.programs import environment, version_of


def argv(pair: Pair) -> list[object]:
    """Its own --host: it listens on every interface otherwise."""
    port, metrics = pair.ports
    words = ["--vllm-pd-disaggregation", "--policy", "round_robin", "--host", "127.0.0.1"]
    words += ["--prefill", pair.prefill.base_url, "--decode", pair.decode.base_url]
    return [environment("vllm-router") / "vllm-router", *words, "--port", port, "--prometheus-port", metrics]


CAUSES = {"errors": "It reads the fields itself: a number that is out of range, or a word for one, is a 422."}
PEER = Peer("vllm-router", "vllm-router", version_of("vllm-router", "vllm-router"), argv, causes=CAUSES)
