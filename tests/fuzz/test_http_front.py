"""The router's port under random bytes: requests by a grammar, mutated, split, cut off.

``PDRELAY_FUZZ_SECONDS`` (10) is how long, ``PDRELAY_FUZZ_SEED`` (17) where it begins: case N of a seed always has
the same bytes, so that ``make test`` looks at the first ones again and again. ``make fuzz SECONDS=3600`` goes on for an
hour.
"""

import json
import os
import random
import re
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.raw_http import Over, RawClient
from support.router_process import router_processes
from support.sim import serving, sims

SECONDS = float(os.environ.get("PDRELAY_FUZZ_SECONDS", "10"))
SEED = os.environ.get("PDRELAY_FUZZ_SEED", "17")
HEAD_S = 1
HEALTH_MOST_S = 5.0  # this machine may have much else to do
GROWTH_MOST = 16 * 1024 * 1024
PATH = b"/v1/completions"
TOKEN = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(SECONDS + 180),
    pytest.mark.slow,
]  # it takes all the time that it is given


# What may reach an engine, by RFC 9112 at its strictest: a parser that shares nothing with the router


class Wrong(Exception):
    """The bytes from here on are no request."""


def bodies_of(stream):
    """Return the bodies of all requests that stand in a stream before the first thing that is wrong."""
    found = []
    left = stream
    with suppress(Wrong):
        while left:
            while left.startswith(b"\r\n"):
                left = left[2:]
            head, mark, left = left.partition(b"\r\n\r\n")
            if not mark:
                break
            body, left = body_of(head.split(b"\r\n"), left)
            found.append(body)
    return found


def body_of(lines, left):
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.0", b"HTTP/1.1") or words[0] == b"CONNECT":
        raise Wrong
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not TOKEN.fullmatch(name) or any((byte < 32 and byte != 9) or byte == 127 for byte in value):
            raise Wrong
        headers.append((name.lower(), value.strip(b" \t")))
    hosts, lengths, codings = (
        [value for name, value in headers if name == wanted]
        for wanted in (b"host", b"content-length", b"transfer-encoding")
    )
    if len(hosts) != 1 and not (words[2] == b"HTTP/1.0" and not hosts):
        raise Wrong
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != b"chunked" or words[2] == b"HTTP/1.0":
            raise Wrong
        return unchunked(left)
    if len(lengths) > 1 or (lengths and not (lengths[0].isdigit() and lengths[0].isascii())):
        raise Wrong
    size = int(lengths[0]) if lengths else 0
    if len(left) < size:
        raise Wrong
    return left[:size], left[size:]


def unchunked(left):
    body = b""
    while True:
        line, mark, left = left.partition(b"\r\n")
        size = line.partition(b";")[0].rstrip(b" \t")
        if not mark or not re.fullmatch(rb"[0-9a-fA-F]+", size):
            raise Wrong
        if int(size, 16) == 0:
            break
        end = int(size, 16)
        if left[end : end + 2] != b"\r\n":
            raise Wrong
        body += left[:end]
        left = left[end + 2 :]
    while True:
        line, mark, left = left.partition(b"\r\n")
        if not mark:
            raise Wrong
        if not line:
            return body, left
        if not TOKEN.fullmatch(line.partition(b":")[0]) or b":" not in line:
            raise Wrong


def prompts_of(stream):
    """Return the prompts that engines may see."""
    found = set()
    for body in bodies_of(stream):
        with suppress(ValueError, AttributeError):
            found.add(json.loads(body).get("prompt"))
    return found


# What is sent


class Case:
    """One connection: its bytes, how they are cut, and how it ends."""

    def __init__(self, number):
        self.number, self.rng = number, random.Random(f"{SEED}-{number}")
        self.made = 0
        rng = self.rng
        stream = b"".join(self.request() for _ in range(rng.choice((1, 1, 2, 3, 5))))
        for _ in range(rng.choice((0, 1, 1, 2, 4, 8))):
            stream = self.mutated(stream)
        self.stream = stream[:400_000]
        self.end = rng.choice(("wait", "wait", "wait", "half-close", "reset"))
        cuts = sorted(rng.randrange(len(self.stream) + 1) for _ in range(rng.choice((0, 0, 1, 3, 20))))
        self.pieces = [self.stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(self.stream)], strict=True)]

    def body(self):
        self.made += 1
        fields = {"prompt": f"case-{self.number}-{self.made}", "max_tokens": 2, "stream": self.rng.random() < 0.3}
        return json.dumps(fields).encode()

    def request(self, *, plain=False):
        rng = self.rng
        path = rng.choice(
            (PATH, PATH, PATH, b"/tokenize", b"/health", b"/v1/nothing", b"/v1/completions?a=b", b"http://x" + PATH)
        )
        method = b"GET" if path == b"/health" else rng.choice((b"POST",) * 8 + (b"PUT", b"HEAD", b"CONNECT"))
        lines = [method + b" " + path + rng.choice((b" HTTP/1.1",) * 9 + (b" HTTP/1.0",)), b"Host: localhost"]
        body = b"" if method == b"GET" else self.body()
        if not plain and rng.random() < 0.2:  # something that looks like a request, in the body
            body = rng.choice((b"", b"\r\n" * 40, b"0\r\n\r\n")) + self.request(plain=True)
        if not plain and rng.random() < 0.1:
            body += b" " * rng.choice((5_000, 70_000, 150_000))
        lines += rng.sample(EXTRAS, rng.choice((0, 0, 1, 2)))
        if body and rng.random() < 0.4:
            lines.append(b"Transfer-Encoding: chunked")
            body = self.chunked(body)
        elif body:
            lines.append(b"Content-Length: %d" % len(body))
        rng.shuffle(lines[1:])
        return b"\r\n".join([*lines, b"", b""]) + body

    def chunked(self, body):
        rng = self.rng
        found = b""
        while body:
            size = rng.choice((1, 2, 7, 50, len(body)))
            piece, body = body[:size], body[size:]
            found += b"%x%b\r\n%b\r\n" % (len(piece), rng.choice((b"",) * 6 + (b";a", b";a=b", b' ;a="b"')), piece)
            if len(found) > 20_000:
                found = found + b"%x\r\n%b\r\n" % (len(body), body) if body else found
                body = b""
        return found + b"0\r\n" + b"".join(rng.sample(TRAILERS, rng.choice((0, 0, 0, 1, 3)))) + b"\r\n"

    def mutated(self, stream):
        rng = self.rng
        at = rng.randrange(len(stream) + 1)
        if rng.random() < 0.6:  # where the structure is
            places = [found.start() for found in re.finditer(rb"\r\n|:|HTTP|Host|[Cc]ontent|chunked", stream[:20_000])]
            at = rng.choice(places) + rng.choice((0, 0, 1, 2)) if places else at
        kind = rng.randrange(6)
        if kind == 0:
            return stream[:at] + rng.choice(BITS) + stream[at:]
        if kind == 1:
            return stream[:at] + stream[at + rng.choice((1, 1, 2, 5, 40)) :]
        if kind == 2:
            return stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]
        if kind == 3:
            until = at + rng.choice((1, 10, 100))
            return stream[:until] + stream[at:until] * rng.choice((1, 1, 2, 50)) + stream[until:]
        if kind == 4:
            return stream[:at] + self.request(plain=True) + stream[at:]
        return stream[:at] + rng.choice((b"a: b\r\n" * 300, b"x" * 70_000, b"\r\n" * 30, b"\0" * 9)) + stream[at:]


EXTRAS = [
    b"Content-Type: application/json", b"Connection: close", b"Connection: keep-alive", b"Expect: 100-continue",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c", b"Connection: Upgrade\r\nUpgrade: websocket", b"Host: y",
    b"Upgrade: h2c", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"TE: trailers", b"Trailer: A", b"X-Request-Id: mine", b"Authorization: Bearer x", b"Proxy-Connection: close",
    b"X: \xe9",
]  # fmt: skip
TRAILERS = [
    b"A: b\r\n",
    b"Host: y\r\n",
    b"Content-Length: 7\r\n",
    b"X-Session-Id: s\r\n",
    b"Transfer-Encoding: chunked\r\n",
]
BITS = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b" ", b"\t", b"\0", b":", b";", b"0\r\n\r\n", b"0", b"+", b"-", b"0x",
    b"Content-Length: 0\r\n", b"\r\nContent-Length: 1", b"\r\nTransfer-Encoding: chunked", b"\r\nHost: z",
    b"\r\n folded",
    b"POST /v1/completions HTTP/1.1\r\n", b"\x80", b"\xff", b"HTTP/1.1", b"\r\nUpgrade: x\r\nConnection: upgrade",
]  # fmt: skip


def sent(port, case):
    """Send it; return what came back."""
    got = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in case.pieces:
            with suppress(ConnectionError):
                sock.sendall(piece)
        if case.end == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return got
        if case.end == "half-close":
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(0.2)
        while len(got) < 1_000_000 and (more := sock.recv(65536)):
            got += more
            sock.settimeout(0.03)
    return got


@dataclass
class Watched:
    """Asks for /health all the while."""

    port: int
    worst: float = 0.0
    fault: Exception | None = None

    def run(self, over):
        try:
            while not over.wait(0.01):
                start = time.monotonic()
                with RawClient(self.port, timeout=HEALTH_MOST_S) as client:
                    client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    try:
                        assert client.answer().status == 200
                    except Over:
                        if time.monotonic() - start < HEAD_S:
                            raise
                        continue  # this process was too slow to send it in time
                    self.worst = max(self.worst, time.monotonic() - start)
        except Exception as exc:
            self.fault = exc


def rss_of(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def test_nothing_but_requests_reaches_an_engine(tmp_path):
    """No crash, no bug in the log, no hang, no growth; and no prompt that the strict parser does not find."""
    engines = sims()
    count = 0
    before = None
    allowed = deque(maxlen=30)
    with serving(engines["p0"]) as prefill, serving(engines["d0"]) as decode:
        flags = ("--prefill", prefill, "--decode", decode, "--health-check-interval", "0", "--log-level", "warning")
        limits = ("--receive-timeout", str(HEAD_S))
        with router_processes(tmp_path, 1, *flags[:-2], *limits) as (router,):
            port = int(router.url.rpartition(":")[2])
            pid = router.child.pid
            watched = Watched(port)
            over = threading.Event()
            watching = threading.Thread(target=watched.run, args=(over,))
            watching.start()
            try:
                start = time.monotonic()
                while (spent := time.monotonic() - start) < SECONDS:
                    case = Case(count)
                    got = sent(port, case)
                    assert not got or re.match(rb"HTTP/1\.1 [1-5][0-9][0-9] ", got), (SEED, count, case.stream)
                    allowed.append(prompts_of(case.stream))
                    for sim in engines.values():
                        log = list(sim.log)
                        sim.log[:] = []
                        for entry in log:
                            check(entry, case, allowed)
                    count += 1
                    if before is None and spent > SECONDS / 5:
                        before = rss_of(pid)
                    assert watched.fault is None, (SEED, count, watched.fault)
                    assert router.child.poll() is None, (SEED, count)
            finally:
                over.set()
                watching.join()
            assert rss_of(pid) - before < GROWTH_MOST
            assert "Traceback" not in router.said
            assert "disagree" not in router.said
    print(f"{count} cases of seed {SEED}; /health took {watched.worst:.3f} s at most")


def check(entry, case, allowed):
    """See that what an engine got is one of the requests; those of a few cases before may come late."""
    prompt = json.loads(entry.body).get("prompt")
    if isinstance(prompt, str):  # else it is the router's own, which has a prefill engine free its blocks
        assert any(prompt in each for each in allowed), (SEED, case.number, prompt, case.stream)
    assert "x-session-id" not in {name.lower() for name in entry.headers}
