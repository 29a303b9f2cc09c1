"""Dynamo: its frontend, and its workers, which are vLLM engines inside; without etcd and NATS.

It knows connectors by their names and refuses ours, so that ours has the name of vLLM's.
"""

import json
import os
import tempfile

from interop.peer import Pair, Peer
from interop.programs import ROOT, beside_vllm, version_of
from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import EngineSpec, environment, options

VLLM = "0.31"  # the one that Dynamo's release names
CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "pdrelay_connector.nixl",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
STORE = tempfile.TemporaryDirectory(prefix="pdrelay-dynamo-")  # where its parts find each other
PLANES = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_FILE_KV": STORE.name,
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
}
NOT_OURS = ("--host", "--port", "--disable-access-log-for-endpoints", "--enable-scale-out", "--kv-transfer-config")


def engine(spec: EngineSpec) -> Command:
    """Return how to start a worker: the options of the same engine, but for those of its HTTP server."""
    python, packages = beside_vllm("dynamo", VLLM)
    words = options(spec)
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word in NOT_OURS:
            if word != "--enable-scale-out":
                words.pop(0)
        elif word != "--enable-prompt-tokens-details":
            kept.append(word)
    argv = [python, "-P", ROOT / "tests/interop/on_cpus.py", "--model", spec.model, *kept]
    argv += ["--disaggregation-mode", spec.role, "--kv-transfer-config", json.dumps(CONFIG)]
    own = {"PYTHONPATH": str(packages), "DYN_SYSTEM_PORT": str(spec.port), **PLANES}
    return Command(spec.name, [*map(str, argv)], {**environment(spec, os.environ), **own}, f"{spec.base_url}/health")


def argv(pair: Pair) -> list[object]:
    """The frontend finds the workers."""
    python, packages = beside_vllm("dynamo", VLLM)
    planes = [f"{name}={value}" for name, value in PLANES.items()]
    words = ["--http-host", "127.0.0.1", "--http-port", pair.ports[0], "--router-mode", "round-robin"]
    return ["env", f"PYTHONPATH={packages}", *planes, python, "-P", "-m", "dynamo.frontend", *words]


CAUSES = {
    "equal": "All tokens and logprobs are equal. Three texts differ, after prompts of ids that are no valid UTF-8: "
    "there vLLM's own text begins with the prompt, and Dynamo's frontend makes texts itself.",
}
PEER = Peer(
    "dynamo",
    "Dynamo (engines of vLLM 0.31, our connector as `NixlConnector`)",
    version_of("dynamo", "ai-dynamo"),
    argv,
    engine=engine,
    causes=CAUSES,
)
