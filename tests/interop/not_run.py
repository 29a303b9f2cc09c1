"""What the matrix has no row for, and why."""

NOT_RUN = {
    "llm-d's sidecar and endpoint picker": "Go programs without a package of their own: building them needs their Go "
    "modules, which the matrix does not fetch. By its source, its `nixlv2` passes P's parameters on.",
    "AIBrix's gateway, Kthena, KServe": "Go programs inside Envoy or a Kubernetes cluster.",
    "Ray Serve LLM 2.60": "it names vLLM 0.27, and our connector begins with 0.30.",
    "LMCache 0.5.6": 'it installs, and an engine on a CPU starts with it, but it moves nothing: "No supported cpu '
    'connector found", and each request waits 4 s for its look-up.',
    "`MultiConnector` with `OffloadingConnector`": 'the engine does not start here: "CPU Offloading is currently only '
    'supported on CUDA-alike and XPU GPUs". With a copy of our own in its place, `tests/e2e/test_offloading.py` runs '
    "it.",
    "`MultiConnector` with `SimpleCPUOffloadConnector`": "it copies by CUDA streams, and does not start without.",
}
