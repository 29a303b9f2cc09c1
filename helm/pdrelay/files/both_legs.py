"""What `helm test` runs: a request must go through a prefill and a decode engine, and its KV from
one to the other.

That the request had two legs is what the router says (Server-Timing); that KV came is what the
decode engines count (vllm:pdrelay_loads_total): one that gets none computes the prompt itself, and
answers all the same. Engines that still load their model are waited for. Exit code 0 with one
sentence that names the engines, or 1 with one that says what is missing.
"""

import argparse
import http.client
import json
import os
import re
import socket
import ssl
import sys
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOADS = "vllm:pdrelay_loads_total"
FAILED = (
    "vllm:pdrelay_(loads_failed_[a-z]+|loads_skipped_(incompatible|local)|kv_params_[a-z_]+)_total"
)
LINE = re.compile(r"^(vllm:pdrelay_\w+)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)
LEG = re.compile(r'(\w+);desc="([^"]*)"(?:;dur=([0-9.]+))?')
PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
PAUSE_S = 1.0  # between two tries
CLOSED = (
    "no metrics of a decode engine can be read at {}: a NetworkPolicy is in between, or none has "
    "started"
)


class Missing(Exception):
    """The test has failed; the message says what is missing, in one sentence."""


def ask(
    router: str, path: str, body: Mapping[str, object] | None, args: argparse.Namespace
) -> tuple[int, str, str]:
    """Return status, Server-Timing and body of the router's answer; Missing if there is none."""
    where = urllib.parse.urlsplit(router)
    secure = where.scheme == "https"
    port = where.port or (443 if secure else 80)
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if (key := shown(args)) else {}
    )
    if secure:
        connection = http.client.HTTPSConnection(
            str(where.hostname), port, timeout=args.wait, context=trust(args)
        )
    else:
        connection = http.client.HTTPConnection(str(where.hostname), port, timeout=args.wait)
    try:
        connection.request(
            "GET" if body is None else "POST", path, json.dumps(body) if body else None, headers
        )
        answer = connection.getresponse()
        return (
            answer.status,
            answer.getheader("Server-Timing") or "",
            answer.read().decode(errors="replace"),
        )
    except (OSError, http.client.HTTPException) as exc:
        if (
            secure
            and not args.cert
            and "certificate required" in str(exc).lower().replace("_", " ")
        ):
            raise Missing(
                "the router wants a certificate of its clients: tests.clientCertSecretName names "
                "one"
            ) from exc
        raise Missing(
            f"the router at {router} gives no answer to {path}: {str(exc) or type(exc).__name__}"
        ) from exc
    finally:
        connection.close()


def shown(args: argparse.Namespace) -> str:
    """Return the key that the router wants, if it wants one: of the environment, or the first that
    can be read.
    """
    if (given := os.environ.get("PDRELAY_TEST_KEY", "")) or not args.keys:
        return given
    keys = [
        line.strip().partition(":")[2]
        for line in read(args.keys).splitlines()
        if not line.startswith("#")
    ]
    if plain := [key for key in keys if key and not key.startswith("sha256:")]:
        return plain[0]
    raise Missing(
        "router.apiKeys has digests only, of which no key can be made: name one in "
        "tests.apiKey.secretName"
    )


def trust(args: argparse.Namespace) -> ssl.SSLContext:
    """Trust the router's own certificate and no other; the name in it is one for the public, so it
    is not looked at.
    """
    if args.wants_cert and not args.cert:
        raise Missing(
            "router.tls.clientCaSecretName is set: name a certificate to show in "
            "tests.clientCertSecretName"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not (first := PEM.search(read(args.pin))):
        raise Missing("router.tls.secretName has no certificate in its tls.crt")
    try:
        context.load_verify_locations(cadata=first[0])
        if args.cert:
            context.load_cert_chain(args.cert, args.cert_key)
    except OSError as exc:  # ssl.SSLError is one
        raise Missing(
            f"a certificate of router.tls or tests.clientCertSecretName cannot be used: {exc}"
        ) from exc
    return context


def read(path: str) -> str:
    """Return a mounted file; Missing if it is not there."""
    try:
        return Path(path).read_text()
    except OSError as exc:
        raise Missing(f"{path} cannot be read: {exc.strerror}") from exc


class Named(ssl.SSLContext):
    """Trusts certificates that have one name, whatever the address."""

    name = ""

    def wrap_socket(self, sock: socket.socket, *args: object, **kwargs: object) -> ssl.SSLSocket:
        """Begin TLS with whoever has the name."""
        return super().wrap_socket(sock, *args, **kwargs | {"server_hostname": self.name})


def engine_trust(args: argparse.Namespace) -> Named | None:
    """Return what https engines are asked with; None: they serve http."""
    if not args.engine_ca:
        return None
    context = Named(ssl.PROTOCOL_TLS_CLIENT)
    context.name = args.engine_server_name
    try:
        context.load_verify_locations(args.engine_ca)
        if args.engine_cert:
            context.load_cert_chain(args.engine_cert, args.engine_cert_key)
    except OSError as exc:  # ssl.SSLError is one
        raise Missing(f"a certificate of engineTls cannot be used: {exc}") from exc
    return context


def counted(args: argparse.Namespace) -> dict[str, float]:
    """Add up the connector's numbers of all engines behind a name; Missing if none can be asked."""
    engines = args.decode
    tls = engine_trust(args)
    host, _, port = engines.rpartition(":")
    try:
        found = {
            one[4][0]
            for one in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        }
    except OSError:
        found = set()
    texts = [
        text for address in sorted(map(str, found)) if (text := metrics(address, int(port), tls))
    ]
    if not texts:
        raise Missing(CLOSED.format(engines))
    numbers: dict[str, float] = {}
    for name, value in LINE.findall("".join(texts)):
        numbers[name] = numbers.get(name, 0.0) + float(value)
    return numbers


def metrics(address: str, port: int, tls: Named | None) -> str:
    """Return an engine's metrics; nothing if it does not answer: a pod of several, or one that is
    loading its model.
    """
    if tls is None:
        connection = http.client.HTTPConnection(address, port, timeout=5)
    else:
        connection = http.client.HTTPSConnection(address, port, timeout=5, context=tls)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode(errors="replace")
    except ssl.SSLError as exc:
        raise Missing(
            f"a decode engine is not reached over TLS (engineTls): {exc.reason or exc}"
        ) from exc
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def legs(timing: str) -> str:
    """Return which engines the request went through, in words; Missing if one of the two is not
    among them.
    """
    found = {name: (engine, ms) for name, engine, ms in LEG.findall(timing)}
    if "prefill" in found and "decode" in found:
        return " and ".join(
            f"{found[leg][0]} ({found[leg][1] or '?'} ms)" for leg in ("prefill", "decode")
        )
    rule = found.get("reason", ("no reason is given", ""))[0]
    alone = found["decode"][0] if "decode" in found else "nobody"
    raise Missing(f"no prefill engine took part: {alone} served the request alone ({rule})")


def said(body: str) -> str:
    """Find the words in an error."""
    try:
        found: Any = json.loads(body)
        return str(found.get("error", {}).get("message") or found.get("detail") or found)[:300]
    except (ValueError, AttributeError):
        return body[:300]


def once(args: argparse.Namespace) -> str:
    """Send one request and say how it went; Missing if it did not go through both."""
    status, _, body = ask(args.router, "/health", None, args)
    if status != 200:
        raise Missing(f"the router at {args.router} has no engine of each role yet: {said(body)}")
    before = counted(args) if args.decode else {}
    words = f"{uuid.uuid4()} " + "a long prompt that nobody has sent before, " * (
        1 + args.chars // 43
    )
    request = {"model": args.model, "prompt": words, "max_tokens": 8, "temperature": 0}
    status, timing, body = ask(args.router, "/v1/completions", request, args)
    if status != 200:
        raise Missing(f"the request was answered with status {status}: {said(body)}")
    way = legs(timing)
    if not args.decode:
        return f"a request went through {way}; whether its KV did is not known: the decode engines are elsewhere"
    deadline = time.monotonic() + args.settle
    while (now := counted(args)).get(LOADS, 0.0) <= before.get(LOADS, 0.0):
        if time.monotonic() >= deadline:
            raise Missing(f"the request went through {way}, but its KV did not: {why(before, now)}")
        time.sleep(0.2)
    return f"a request went through {way}, and its KV from one to the other"


def why(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Say what the decode engines counted instead."""
    if LOADS not in now:
        return "the decode engines have no pdrelay connector, or none that counts"
    rose = [
        name
        for name in sorted(now)
        if re.fullmatch(FAILED, name) and now[name] > before.get(name, 0.0)
    ]
    return (
        f"{LOADS} stands still, and so does every reason" if not rose else f"{', '.join(rose)} rose"
    )


def main(arguments: list[str]) -> int:
    """Try until it goes well or the time is over; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--router", required=True, help="URL of the routers' service")
    parser.add_argument("--model", required=True, help="name of the model that clients say")
    parser.add_argument(
        "--decode",
        default="",
        help="HOST:PORT of the decode engines; empty: their KV is not counted",
    )
    parser.add_argument(
        "--seconds", type=float, required=True, help="for engines that are not there yet"
    )
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for one answer")
    parser.add_argument(
        "--settle", type=float, default=15.0, help="seconds until engines have counted"
    )
    parser.add_argument("--chars", type=int, default=400, help="length of the prompt, at least")
    parser.add_argument("--keys", default="", help="file with name:key of clients")
    parser.add_argument("--pin", default="", help="PEM file with the router's certificate")
    parser.add_argument(
        "--wants-cert", action="store_true", help="the router wants a certificate of its clients"
    )
    parser.add_argument("--cert", default="", help="PEM file with a certificate to show")
    parser.add_argument("--cert-key", default="", help="PEM file with its private key")
    parser.add_argument(
        "--engine-ca", default="", help="PEM file with the authorities of engines that serve https"
    )
    parser.add_argument(
        "--engine-server-name",
        default="",
        help="the name in their certificates; needed with --engine-ca",
    )
    parser.add_argument(
        "--engine-cert", default="", help="PEM file with a certificate to show to them"
    )
    parser.add_argument("--engine-cert-key", default="", help="PEM file with its private key")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + args.seconds
    while True:
        try:
            sys.stdout.write(f"pdrelay test: {once(args)}\n")
            return 0
        except Missing as exc:
            if time.monotonic() >= deadline:
                sys.stdout.write(f"pdrelay test: {exc}\n")
                return 1
            time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
