"""The preStop hook of an engine's pod: waits until nobody needs it any more, or its time is over.

Routers hear of the pod's deletion when this begins, and send nothing new. A decode engine is done when its last request
is; a prefill engine, when decode engines have also read the KV cache blocks that it keeps for them. vLLM's numbers are
those of its last step, so they count when they are seen twice in a row. Exit code 0 always: the pod ends either way.
"""

import argparse
import http.client
import os
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LEASES = "vllm:xpyd_leases_held"
LINE = re.compile(r"^(vllm:\w+)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever HTTP_PROXY says: it is this very pod
PAUSE_S = 0.5  # between two looks
SURE = 2  # looks in a row
GONE = {"nobody listens": 1.0}  # in place of metrics: the model is still being loaded, or the server has ended


def read(port: int) -> dict[str, float]:
    """Return the engine's metrics, summed over its ranks; none if it does not answer, GONE if its port is closed."""
    try:
        with DIRECT.open(f"http://localhost:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except urllib.error.URLError as exc:
        return GONE if isinstance(exc.reason, ConnectionRefusedError) else {}
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    found: dict[str, float] = {}
    for name, value in LINE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def left(role: str, numbers: dict[str, float], *, quiet_s: float, lease_s: float) -> str:
    """Say what is left to wait for; nothing: an empty string."""
    if numbers is GONE:
        return ""
    if not numbers:
        return "an answer to /metrics"
    if requests := sum(numbers.get(name, 0.0) for name in REQUESTS):
        return f"{requests:g} requests"
    if role == "decode":
        return ""
    if LEASES not in numbers:  # another connector, which does not say: its leases end by themselves
        return "" if quiet_s >= lease_s else f"leases of {lease_s:g} s"
    return f"{numbers[LEASES]:g} leases" if numbers[LEASES] else ""


def drain(role: str, port: int, *, settle_s: float, lease_s: float, seconds: float) -> str:
    """Wait, and say how it ended."""
    started = busy = time.monotonic()
    calm = 0
    while (now := time.monotonic()) < started + seconds:
        numbers = read(port)
        if sum(numbers.get(name, 0.0) for name in REQUESTS):
            busy = now
        waiting = left(role, numbers, quiet_s=now - busy, lease_s=lease_s)
        calm = 0 if waiting else calm + 1
        if calm >= SURE and now >= started + settle_s:
            return f"drained after {now - started:.1f} s"
        time.sleep(min(PAUSE_S, max(0.0, started + seconds - now)))
    return f"not drained in {seconds:g} s: {waiting or 'it was empty for one look only'}"


def main() -> None:
    """Read the arguments, wait, and leave one line in the container's log."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--settle", type=float, required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    said = drain(args.role, args.port, settle_s=args.settle, lease_s=args.lease, seconds=args.seconds)
    line = f"xpyd drain: {said}\n"
    try:
        with Path(os.environ.get("XPYD_DRAIN_LOG", "/proc/1/fd/1")).open("w") as log:  # its own output is shown nowhere
            log.write(line)
    except OSError:
        sys.stdout.write(line)


if __name__ == "__main__":
    main()
