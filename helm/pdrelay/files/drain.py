"""The preStop hook of an engine's pod: waits until nobody needs it any more, or its time is over.

Routers hear of the pod's deletion when this begins, and send nothing new. An engine is done when
its last request is, and when decode engines have read the KV cache blocks that it keeps for them.
Whatever the pod's label says, it may have turned, so the role matters only where the engine does
not show how many leases it has. vLLM's numbers are those of its last step, so they count when they
are seen twice in a row. In a pod of an engine of several, which cannot go on without it, the
numbers are those of the engine's leader. An engine that serves https is asked by the name in its
certificate. Exit code 0 always: the pod ends either way.
"""

import argparse
import http.client
import os
import re
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LEASES = "vllm:pdrelay_leases_held"
LINE = re.compile(r"^(vllm:\w+)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)
SURE = 2  # looks in a row
# in place of metrics: the model is still being loaded, or the server has ended
GONE = {"nobody listens": 1.0}
PATIENCE_S = 5.0  # for one answer


class Named(ssl.SSLContext):
    """Trusts certificates that have one name, whatever the address; what files say may have changed
    since the last.
    """

    name = ""

    def wrap_socket(self, sock: socket.socket, *args: object, **kwargs: object) -> ssl.SSLSocket:
        """Begin TLS with whoever has the name."""
        return super().wrap_socket(sock, *args, **kwargs | {"server_hostname": self.name})


class Engine:
    """Where an engine is, and how it is reached."""

    def __init__(self, args: argparse.Namespace) -> None:
        host = os.environ.get("LWS_LEADER_ADDRESS", "localhost") if args.of_leader else "localhost"
        self.url = f"{'https' if args.ca else 'http'}://{host}:{args.port}"
        self._args = args

    def open(self, path: str, *, patience_s: float) -> http.client.HTTPResponse:
        """Get a path; raises OSError."""
        ways: list[urllib.request.BaseHandler] = [
            urllib.request.ProxyHandler({})
        ]  # whatever HTTP_PROXY says: it is near
        if self._args.ca:
            ways.append(urllib.request.HTTPSHandler(context=self._trust()))
        answer: http.client.HTTPResponse = urllib.request.build_opener(*ways).open(
            self.url + path, timeout=patience_s
        )
        return answer

    def _trust(self) -> Named:
        """Read the files anew: they are replaced while the pod lives."""
        context = Named(ssl.PROTOCOL_TLS_CLIENT)
        context.name = self._args.server_name
        context.load_verify_locations(self._args.ca)
        if self._args.cert:
            context.load_cert_chain(self._args.cert, self._args.cert_key)
        return context


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare what an Engine needs."""
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--ca", default="", help="PEM file with the authorities of an engine that serves https"
    )
    parser.add_argument(
        "--server-name", default="", help="the name in its certificate; needed with --ca"
    )
    parser.add_argument("--cert", default="", help="PEM file with a certificate to show to it")
    parser.add_argument("--cert-key", default="", help="PEM file with its private key")
    parser.add_argument(
        "--of-leader", action="store_true", help="the engine is where $LWS_LEADER_ADDRESS says"
    )


def read(engine: Engine, *, patience_s: float) -> dict[str, float]:
    """Return the engine's metrics, summed over its ranks; none if it does not answer, GONE if there
    is no server.
    """
    try:
        with engine.open("/metrics", patience_s=patience_s) as answer:
            text = answer.read().decode()
    except urllib.error.URLError as exc:
        return GONE if isinstance(exc.reason, (ConnectionRefusedError, socket.gaierror)) else {}
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
    if LEASES in numbers:
        return f"{numbers[LEASES]:g} leases" if numbers[LEASES] else ""
    # another connector, which does not say: its leases end by themselves
    if role == "decode" or quiet_s >= lease_s:
        return ""
    return f"leases of {lease_s:g} s"


def drain(
    role: str,
    engine: Engine,
    *,
    settle_s: float,
    lease_s: float,
    seconds: float,
    pause_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait, and say how it ended."""
    started = busy = clock()
    calm = 0
    waiting = left(role, {}, quiet_s=0.0, lease_s=lease_s)
    while (now := clock()) < started + seconds:
        numbers = read(engine, patience_s=min(PATIENCE_S, started + seconds - now))
        if not numbers and clock() >= started + seconds:
            break  # the look was cut short: what an earlier one saw is what is left
        if sum(numbers.get(name, 0.0) for name in REQUESTS):
            busy = now
        waiting = left(role, numbers, quiet_s=now - busy, lease_s=lease_s)
        calm = 0 if waiting else calm + 1
        if calm >= SURE and now >= started + settle_s:
            return f"drained after {now - started:.1f} s"
        sleep(min(pause_s, max(0.0, started + seconds - now)))
    return f"not drained in {seconds:g} s: {waiting or 'it was empty for one look only'}"


def main() -> None:
    """Read the arguments, wait, and leave one line in the container's log."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    add_engine(parser)
    parser.add_argument("--settle", type=float, required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two looks")
    args = parser.parse_args()
    said = drain(
        args.role,
        Engine(args),
        settle_s=args.settle,
        lease_s=args.lease,
        seconds=args.seconds,
        pause_s=args.pause,
    )
    line = f"pdrelay drain: {said}\n"
    try:
        with Path(os.environ.get("PDRELAY_DRAIN_LOG", "/proc/1/fd/1")).open(
            "w"
        ) as log:  # its own output is shown nowhere
            log.write(line)
    except OSError:
        sys.stdout.write(line)


if __name__ == "__main__":
    main()
