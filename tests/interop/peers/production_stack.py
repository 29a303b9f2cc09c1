"""production-stack's router, in the mode that carries vLLM's parameters."""

from interop.peer import Pair, Peer
from interop.programs import environment, repository
from support.cluster import MODEL_NAME

COMMIT = "a6c01db05f65f556235413ba8dbcfb0c01132fff"  # of 2026-08-05


def argv(pair: Pair) -> list[object]:
    """As its example for two engines on one host: under the name localhost, which it writes over P's address."""
    source = repository("https://github.com/vllm-project/production-stack", COMMIT) / "src"
    backends = ",".join(f"http://localhost:{spec.port}" for spec in (pair.prefill, pair.decode))
    words = ["--service-discovery", "static", "--static-backends", backends]
    words += ["--static-models", f"{MODEL_NAME},{MODEL_NAME}", "--static-model-labels", "p,d"]
    words += ["--prefill-model-labels", "p", "--decode-model-labels", "d", "--host", "127.0.0.1"]
    words += ["--routing-logic", "disaggregated_prefill_orchestrated", "--port", str(pair.ports[0])]
    return ["env", f"PYTHONPATH={source}", environment("production-stack") / "python", "-m", "vllm_router.app", *words]


PEER = Peer(
    "production-stack",
    "production-stack, `disaggregated_prefill_orchestrated`; P with `sign_host: false`",
    f"`{COMMIT[:8]}`",
    argv,
    connector={"sign_host": False},
    causes={"errors": "A body that is no JSON is a 500; engines' errors keep their status."},
)
