"""The router's port, by clients that send what no client should: limits, deadlines and framing, byte by byte.

Nothing here knows what is behind the port: a router process, asked over TCP, before simulated engines that tell what
has reached them.
"""

import json
import os
import re
import resource
import shutil
import signal
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from support.certificates import Authority
from support.proc import waited_s
from support.raw_http import Over, RawClient
from support.router_process import RouterProcess
from support.sim import fleet, until

pytestmark = pytest.mark.processes


PATH = "/v1/completions"
BODY = b'{"prompt": "once upon", "max_tokens": 3}'
KIB64 = 64 * 1024
JSON = "Content-Type: application/json"
KEY = "Authorization: Bearer open-sesame-0001"


class Front:
    """A router process and its engines."""

    def __init__(self, process, engines, tls):
        self.process = process
        self.engines = engines
        self.tls = tls
        self.port = int(process.url.rpartition(":")[2])
        self.open = partial(RawClient, self.port, tls=tls)
        self.too_late = 0  # connections on which this process has said nothing in time: the machine is busy

    def ask(self, *pieces):
        """Send on a connection of its own, and return all answers; the router has to close it."""
        with suppress(Over), self.open() as client:
            return client.send(*pieces).answers()
        return []

    def status(self, *pieces):
        """Return the one status that a connection got before the router closed it."""
        found = self.ask(*pieces)
        assert [one.headers.get("connection") for one in found] == ["close"], found
        return found[0].status

    def get(self, path="/health"):
        asked = request(path, method="GET", lines=("Connection: close",))
        while not (found := self.ask(asked)):
            self.too_late += 1
            assert self.too_late < 50
        return found[0]

    def metric(self, name, **labels):
        """Return a number of /metrics; 0 if it is not there."""
        wanted = name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(wanted + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def refused(self, reason):
        return self.metric("pdrelay_connections_refused_total", reason=reason)

    @property
    def prompts(self):
        """What has reached the prefill engine."""
        return [json.loads(entry.body).get("prompt") for entry in self.engines["p0"].log]

    def serves(self):
        try:
            with self.open() as client:
                return client.send(request()).answer().status == 200
        except (ConnectionError, Over):  # one too many: closed at once, or in its TLS handshake
            return False


def request(path=PATH, body=None, *, method="POST", version="1.1", lines=(JSON,), host=True, length=True):
    """Return the bytes of a request."""
    body = (BODY if method == "POST" else b"") if body is None else body
    head = [f"{method} {path} HTTP/{version}", *(["Host: localhost"] if host else []), *lines]
    if length and (body or method == "POST"):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


@contextmanager
def front(folder, *flags, tls=None, soft=None, hard=None, x=1, y=1, **options):
    """Run one in front of pretended engines."""
    with fleet(x, y, **options) as (engines, _, words), ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = (soft or hard, hard or before[1]) if soft or hard else None
        words = (*words, "--health-check-interval", "0", *flags)
        router = RouterProcess(folder / "router.log", *words, descriptors=few)
        stack.callback(router.kill)
        yield Front(router.started(), engines, tls)
        assert "Traceback" not in router.said, router.said


KINDS = ["http", "tls"]


@contextmanager
def front_of(kind, folder, *flags, **options):
    """Run a router of a kind."""
    tls = None
    if kind == "tls":
        authority = Authority(folder, "ca")
        pair = authority.sign("router")
        tls = ssl.create_default_context(cafile=authority.own.cert)
        flags = (*flags, "--tls-cert", pair.cert, "--tls-key", pair.key)
    with front(folder, *flags, tls=tls, **options) as found:
        yield found


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    """A router with the defaults."""
    with front(tmp_path_factory.mktemp("door")) as found:
        yield found


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """The same, behind TLS."""
    with front_of("tls", tmp_path_factory.mktemp("door")) as found:
        yield found


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """A router that wants keys."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("me:open-sesame-0001\n")
    with front(folder, "--api-keys-file", str(folder / "keys")) as found:
        yield found


# Heads

LINE = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode()
HEADS = {
    "many headers": (LINE, b"a: b\r\n" * 1000, 431),
    "a value": (LINE + b"a: ", b"x" * 10_000, 431),
    "a name": (LINE, b"x" * 10_000, 431),
    "values": (LINE, b"a: %b\r\n" % (b"x" * 1000), 431),
    "a url": (b"POST /v1/", b"x" * 10_000, 414),
    "a method": (b"", b"X" * 10_000, 414),
    "a version": (b"GET / HTTP/1.1", b"1" * 10_000, 414),
    "empty lines": (b"", b"\r\n" * 5000, 400),
}
SERVED = {"first": b"", "later": request(), "after FastAPI": request("/health", method="GET")}


@pytest.mark.parametrize("before", SERVED)
@pytest.mark.parametrize("head", HEADS)
def test_a_head_without_end_is_refused(door, head, before):
    """In one sentence, on every way; and the client can read it though it sends on."""
    start, piece, status = HEADS[head]
    with door.open() as client:
        if SERVED[before]:
            assert client.send(SERVED[before]).answer().status == 200
        found = client.send(start).flood(piece, 2_000_000).answers()

    assert [one.status for one in found] == [status]
    assert found[0].headers["connection"] == "close"
    sentence = json.loads(found[0].body)["error"]["message"]
    assert sentence
    assert "\n" not in sentence


def test_heads_without_end_are_refused_by_the_others(another):
    """With TLS, and by each worker."""
    for start, piece, status in HEADS.values():
        with another.open() as client:
            assert [one.status for one in client.send(start).flood(piece, 500_000).answers()] == [status]


@pytest.mark.parametrize("behind", ["one request", "a stream"])
def test_a_pipelined_head_without_end_is_refused_in_its_turn(door, behind):
    """The answer before it is complete, and the refusal stands behind it."""
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": behind == "a stream"}).encode()
    with door.open() as client:
        found = client.send(request(body=body) + LINE).flood(b"a: b\r\n" * 1000, 200_000).answers()

    assert [one.status for one in found] == [200, 431]


SHAPES = {
    "malformed": (request("{path}", lines=("a b",)), 400),
    "a host": (request("http://localhost{path}?a=b", lines=("a b",)), 400),
    "in pieces": ((b"POST ", b"{path} HTTP/1.1\r\nHost: localhost\r\na b\r\n", b"\r\n"), 400),
    "behind another": (request() + request("{path}", lines=("a b",)), 400),
    "a large head": (request("{path}", lines=("a: " + "b" * 70_000,)), 431),
    "a long target": (request("{path}?" + "a" * 70_000), 414),
    "a bad chunk": (request("{path}", b"x\r\n", lines=(JSON, "Transfer-Encoding: chunked"), length=False), 400),
    "a tunnel": (b"CONNECT {path} HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_refusal_at_the_door_has_the_shape_of_its_api(door, case):
    """Anthropic's for the Messages API, and OpenAI's for the others: the target says which, if it can be read."""
    pieces, status = SHAPES[case]
    for path, kinds in (
        (PATH, {"error"}),
        ("/v1/messages", {"type", "error"}),
        ("/v1/messages/batches", {"type", "error"}),
    ):
        sent = pieces if isinstance(pieces, tuple) else (pieces,)
        with door.open() as client:
            for piece in sent:
                client.send(piece.replace(b"{path}", path.encode()))
            *_, answer = client.answers()
        assert (answer.status, json.loads(answer.body).keys()) == (status, kinds)


def padded(size, lines=()):
    """Return a request whose head has exactly so many bytes."""
    short = request(lines=(JSON, *lines, "X-Padding: "))
    return request(lines=(JSON, *lines, "X-Padding: " + "x" * (size + len(BODY) - len(short))))


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(("size", "lines", "status"), [
    (KIB64, 0, 200), (KIB64 + 1, 0, 431), (5000, 253, 200), (5000, 254, 431), (3000, 253, 200), (3000, 254, 431),
])  # fmt: skip
def test_the_limit_of_a_head_is_exact(door, size, lines, status, pieces):
    """64 KiB, and 256 lines besides the request line: however they come."""
    whole = padded(size, ["a: b"] * (lines - 1) if lines else ())
    assert len(whole) - len(BODY) == size
    if lines:
        assert whole.count(b"\r\n") == lines + 5
    step = -(-len(whole) // pieces)
    with door.open() as client:
        client.send(*[whole[at : at + step] for at in range(0, len(whole), step)])

        assert client.answer().status == status


def test_what_is_refused_is_counted(door):
    """By its reason."""
    reasons = ("head_too_large", "uri_too_long", "malformed", "method")
    before = [door.refused(name) for name in reasons]
    assert door.status(padded(KIB64 + 1)) == 431
    assert door.status(request("/" + "x" * KIB64)) == 414
    assert door.status(request(host=False)) == 400
    assert door.status(b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\n\r\n") == 501

    assert [door.refused(name) for name in reasons] == [count + 1 for count in before]


# Trailers

CHUNKED = (JSON, "Transfer-Encoding: chunked")


def chunked(body=BODY, trailers=b"", *, lines=CHUNKED, path=PATH, size=None):
    """Return a request in chunks, each of ``size`` bytes."""
    size = size or len(body)
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(body[at : at + size]), body[at : at + size]) for at in range(0, len(body), size)
    )
    return request(path, lines=lines, length=False, body=chunks + b"0\r\n" + trailers + b"\r\n")


def test_trailers_are_dropped(door):
    """They reach no engine as headers."""
    door.engines["p0"].log.clear()
    trailers = b"X-Session-Id: mine\r\nX-Vllm-Priority: 3\r\nTraceparent: 00-aa\r\n"
    with door.open() as client:
        for path in (PATH, "/tokenize"):
            client.send(chunked(trailers=trailers, path=path))
            assert client.answer().status in (200, 404)
        assert client.send(request()).answer().status == 200

    sent = [name.lower() for sim in door.engines.values() for entry in sim.log for name in entry.headers]
    assert not {"x-session-id", "x-vllm-priority", "traceparent"} & set(sent)


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_a_key_in_a_trailer_is_no_key(locked, path):
    """What stands in front of the router has not seen it."""
    with locked.open() as client:
        client.send(chunked(trailers=b"%b\r\n" % KEY.encode(), path=path))
        assert client.answer().status == 401


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_a_key_that_is_taken_away_while_a_body_comes_is_no_key(tmp_path, path):
    """Its salt is made of the key: without one there is none."""
    keys = tmp_path / "keys"
    keys.write_text("me:open-sesame-0001\nother:open-parsley-001\n")
    flags = ("--api-keys-file", str(keys), "--cache-salt-per-key", "true")
    body = json.dumps({"prompt": "x" * 2 * KIB64, "input": "x"}).encode()
    with front(tmp_path, *flags) as door, door.open() as client:
        sent = request(path, body, lines=(JSON, KEY))
        client.send(sent[:-10])
        time.sleep(0.2)  # it is let in
        keys.write_text("other:open-parsley-001\n")
        door.process.signal(signal.SIGHUP)
        until(lambda: "the settings were read again" in door.process.said)
        answer = client.send(sent[-10:]).answer()

    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("path", [PATH, "/tokenize", "/health"])
def test_trailers_without_end_are_refused(locked, path):
    """Also behind a 401, which stands there already."""
    with locked.open() as client:
        client.send(chunked(path=path)[:-2])
        found = client.flood(b"a: b\r\n" * 1000, 3_000_000).answers()

    assert [one.status for one in found] in ([401], [431], [401, 431], [405])


def test_trailers_have_the_limit_of_a_head(door):
    """64 KiB, 256 lines."""
    many = b"a: b\r\n" * 256
    long = b"a: %b\r\n" % (b"x" * (KIB64 - 7))
    for trailers, status in ((many, 200), (many + b"a: b\r\n", 431), (long, 200), (long[:3] + b"x" + long[3:], 431)):
        with door.open() as client:
            assert client.send(chunked(trailers=trailers)).answer().status == status, trailers[:20]


# Framing

OK, BAD = 200, 400
FRAMING = {
    "plain": (request(), OK),
    "chunked": (chunked(), OK),
    "tiny chunks": (chunked(size=1), OK),
    "chunk extensions": (chunked().replace(b"28\r\n", b'28;a=b;c="d;e"\r\n'), OK),
    "spaces around a value": (request(lines=("Content-Type: \t application/json \t",)), OK),
    "an empty line in front": (b"\r\n" + request(), OK),
    "Chunked": (chunked(lines=(JSON, "Transfer-Encoding: Chunked")), OK),
    "a tab behind a coding": (chunked(lines=(JSON, "Transfer-Encoding: chunked\t")), OK),
    "no Host": (request(host=False), BAD),
    "two Hosts": (request(lines=(JSON, "Host: y")), BAD),
    "the same Host twice": (request(lines=(JSON, "Host: localhost")), BAD),
    "no Host in HTTP/1.0": (request(host=False, version="1.0"), OK),
    "two Hosts in HTTP/1.0": (request(lines=(JSON, "Host: y"), version="1.0"), BAD),
    "gzip, chunked": (chunked(lines=(JSON, "Transfer-Encoding: gzip, chunked")), BAD),
    "chunked, chunked": (chunked(lines=(JSON, "Transfer-Encoding: chunked, chunked")), BAD),
    "identity": (chunked(lines=(JSON, "Transfer-Encoding: identity")), BAD),
    "chunked twice": (chunked(lines=(*CHUNKED, "Transfer-Encoding: chunked")), BAD),
    "an empty coding": (chunked(lines=(JSON, "Transfer-Encoding:")), BAD),
    "chunked with a parameter": (chunked(lines=(JSON, "Transfer-Encoding: chunked;q=1")), BAD),
    "chunked in HTTP/1.0": (chunked().replace(b"HTTP/1.1", b"HTTP/1.0"), BAD),
    "both lengths": (chunked(lines=(*CHUNKED, "Content-Length: 5")), BAD),
    "two lengths": (request(lines=(JSON, f"Content-Length: {len(BODY)}")), BAD),
    "a list of lengths": (request(length=False, lines=(JSON, "Content-Length: 40, 40")), BAD),
    "a signed length": (request(length=False, lines=(JSON, "Content-Length: +40")), BAD),
    "an endless length": (request(length=False, lines=(JSON, "Content-Length: " + "9" * 30)), BAD),
    "an empty length": (request(length=False, lines=(JSON, "Content-Length:")), BAD),
    "a space before the colon": (request(lines=("Content-Type : application/json",)), BAD),
    "a folded line": (request(lines=("A: b\r\n c: d",)), BAD),
    "a bare LF": (request().replace(b"Host: localhost\r\n", b"Host: localhost\n"), BAD),
    "bare LFs": (request().replace(b"\r\n", b"\n"), BAD),
    "a bare CR": (request(lines=("A: b\rc",)), BAD),
    "a NUL": (request(lines=("A: b\0c",)), BAD),
    "no colon": (request(lines=("Nothing",)), BAD),
    "no name": (request(lines=(": b",)), BAD),
    "HTTP/2.0": (request(version="2.0"), BAD),
    "HTTP/1.2": (request(version="1.2"), BAD),
    "two spaces": (request().replace(b"POST ", b"POST  "), BAD),
    "an odd target": (request("/v1/\xe4"), BAD),
    "a chunk with a bad size": (chunked().replace(b"28\r\n", b"0x28\r\n"), BAD),
    "a chunk with a signed size": (chunked().replace(b"28\r\n", b"-28\r\n"), BAD),
    "a chunk with a huge size": (chunked().replace(b"28\r\n", b"%b28\r\n" % (b"0" * 20)), BAD),
    "a chunk longer than it says": (chunked().replace(b"28\r\n", b"27\r\n"), BAD),
    "a size with a bare LF": (chunked().replace(b"28\r\n", b"28\n"), BAD),
    "a chunk that ends with LF": (chunked().replace(b"}\r\n0", b"}\n0"), BAD),
    "extensions without end": (chunked().replace(b"28\r\n", b"28;a=%b\r\n" % (b"x" * 70_000)), BAD),
    "a trailer that is none": (chunked(trailers=b"GET / HTTP/1.1\r\n"), BAD),
    "a bad body, expected": (chunked(lines=(*CHUNKED, "Expect: 100-continue")).replace(b"28\r\n", b"x\r\n"), BAD),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\nHost: localhost:443\r\n\r\n", 501),
    "CONNECT with a body": (request("x:443", method="CONNECT", body=BODY), 501),
}  # fmt: skip


@pytest.mark.parametrize("shape", FRAMING)
def test_what_readers_could_understand_differently_is_refused(door, shape):
    """And closed, so that nothing behind it is taken for a request; whether it comes in one piece or in many."""
    sent, status = FRAMING[shape]
    smuggled = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 25\r\n\r\n" % PATH.encode()
        + b'{"prompt":"SMUGGLED","a":'
    )
    for pieces in ((sent,), [*[sent[at : at + 23] for at in range(0, 230, 23)], sent[230:]]):
        with door.open() as client:
            client.send(*pieces)
            assert client.answer().status == status
            if status != OK:
                client.send(smuggled)
                assert client.rest() == b""
    assert "SMUGGLED" not in door.prompts


# Upgrades

SMUGGLED = request(body=b'{"prompt": "SMUGGLED", "max_tokens": 2}')
UPGRADES = {
    "h2c": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIA"),
    "websocket": ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    "anything": ("connection: keep-alive, uPgrade", "uPgrade: anything/1"),
    "twice": ("Connection: Upgrade", "Upgrade: a", "Upgrade: b"),
    "proxy": ("Proxy-Connection: Upgrade", "Upgrade: h2c"),
}  # fmt: skip


@pytest.mark.parametrize("path", [PATH, "/tokenize", "/health", "/nowhere"])
@pytest.mark.parametrize("upgrade", ["h2c", "anything"])
@pytest.mark.parametrize("split", ["one write", "head and body", "pieces", "chunked", "CRLFs in front"])
def test_a_body_behind_an_upgrade_is_a_body(door, upgrade, path, split):
    """The offer is ignored; nothing of the body becomes a request."""
    door.engines["p0"].log.clear()
    lines = (JSON, *UPGRADES[upgrade])
    if split == "chunked":
        sent = chunked(SMUGGLED, lines=(*lines, "Transfer-Encoding: chunked"), path=path)
    else:
        sent = request(path, SMUGGLED if split != "CRLFs in front" else b"\r\n" * 100_000 + SMUGGLED, lines=lines)
    end = sent.index(b"\r\n\r\n") + 4
    pieces = {
        "head and body": [sent[:end], sent[end:]],
        "bytes": [sent[at : at + 20] for at in range(0, len(sent), 20)],
    }
    with door.open() as client:
        client.send(*pieces.get(split, [sent]))
        first = client.answer()
        second = client.send(request("/health", method="GET", lines=("Connection: close",))).answers()

    assert first.status == {PATH: 400, "/tokenize": 400, "/health": 405, "/nowhere": 404}[path]
    assert [one.status for one in second] == [200]
    assert not door.prompts


@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_that_offers_an_upgrade_is_served(door, another, upgrade):
    """As Java's HttpClient sends it by default: with a body, and without."""
    for each in (door, another):
        with each.open() as client:
            assert client.send(request(lines=(JSON, *UPGRADES[upgrade]))).answer().status == 200
            assert client.send(request("/health", method="GET", lines=UPGRADES[upgrade])).answer().status == 200
            assert client.send(request("/v1/realtime", method="GET", lines=UPGRADES[upgrade])).answer().status == 404
            assert client.send(request()).answer().status == 200


JAVA = """
import java.net.URI; import java.net.http.*;
public class Ask { public static void main(String[] a) throws Exception {
    var client = HttpClient.newHttpClient();
    for (int i = 0; i < 2; i++) {
        var body = HttpRequest.BodyPublishers.ofString("{\\"prompt\\": \\"java\\", \\"max_tokens\\": 2}");
        var post = HttpRequest.newBuilder(URI.create(a[0])).header("Content-Type", "application/json");
        System.out.println(client.send(post.POST(body).build(), HttpResponse.BodyHandlers.ofString()).statusCode());
    } } }
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")
def test_java_gets_its_answer(door, tmp_path):
    """Its client offers h2c with each request."""
    (tmp_path / "Ask.java").write_text(JAVA)
    door.engines["p0"].log.clear()
    url = f"http://127.0.0.1:{door.port}{PATH}"
    ran = subprocess.run(["java", str(tmp_path / "Ask.java"), url], capture_output=True, text=True, timeout=60)

    assert ran.stdout.split() == ["200", "200"], ran.stderr
    assert door.prompts == ["java"] * 2


# Time


@pytest.fixture(scope="module", params=KINDS)
def hasty(request, tmp_path_factory):
    """A router that has little time."""
    with front_of(request.param, tmp_path_factory.mktemp("hasty"), "--receive-timeout", "0.4") as found:
        yield found


HALF = request(body=b"x" * 20_000)[:10_000]
LATE = {
    "half a request line": b"POST /v1",
    "a request line": LINE,
    "half a head": LINE + b"Content-Le",
    "a head without its body": request()[: -len(BODY)],
    "half a body": HALF,
    "half a chunk": chunked(b"x" * 20_000)[:10_000],
    "half of a chunk's size": chunked(b"x" * 20_000)[:-6] ,
    "a body without its last chunk": chunked()[:-5],
    "half of the trailers": chunked(trailers=b"a: b\r\n")[:-4],
    "half a body for FastAPI": request("/tokenize", b"x" * 20_000)[:10_000],
    "half a body of another length": request(body=b"x" * 200_000)[:12_000],
}  # fmt: skip


def begun(door, sent, *, before=b"", stack, within_s=0.4):
    """Send part of a request on a new connection; on another one if this took longer than the router waits."""
    for _ in range(20):
        start = time.monotonic()
        with suppress(Over):
            client = stack.enter_context(door.open())
            if before:
                assert client.send(before).answer().status == 200
                start = time.monotonic()
            client.send(sent)
            if time.monotonic() - start < within_s:
                return client
            client.sock.close()
    raise AssertionError("this machine is too busy to send anything in time")


def late_answers(door, sent, **more):
    """Return what a request gets that was sent in part; anew where it is nothing.

    A router that had no core for that long sees that the time is over before it sees what was sent.
    """
    for _ in range(20):
        with ExitStack() as stack:
            if found := begun(door, sent, stack=stack, **more).answers():
                return found
    return []


@pytest.mark.parametrize("before", SERVED)
def test_a_request_that_does_not_come_to_its_end_is_given_up(hasty, before):
    """In a sentence that says how long it had; and nothing is left of it."""
    start = time.monotonic()
    with ExitStack() as stack:
        # Each is opened just before: one that waits for its turn would be late, too.
        clients = {name: begun(hasty, LATE[name], before=SERVED[before], stack=stack) for name in LATE}
        found = {name: client.answers() for name, client in clients.items()}
    found = {name: each or late_answers(hasty, LATE[name], before=SERVED[before]) for name, each in found.items()}

    assert {name: [one.status for one in each] for name, each in found.items()} == {name: [408] for name in LATE}
    assert all("0.4 s" in json.loads(one.body)["error"]["message"] for each in found.values() for one in each)
    assert time.monotonic() - start < 45


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_a_connection_without_a_request_is_closed(hasty, sent):
    """Without an answer: it has asked for nothing, and could take one for that to its next request."""
    with ExitStack() as stack:
        assert begun(hasty, sent, stack=stack).rest() == b""


def test_a_connection_that_had_an_answer_may_rest(hasty):
    """For 75 s, not only for the time of a head."""
    with ExitStack() as stack:
        client = begun(hasty, b"", before=request(), stack=stack)
        for sent in (request("/health", method="GET"), request("/nowhere"), request()):
            time.sleep(0.6)
            client.send(sent).answer()
        time.sleep(0.6)

        assert client.send(request()).answer().status == 200


def test_a_body_that_comes_fast_enough_is_waited_for(tmp_path):
    """It has a second more for each 16 KiB."""
    with front(tmp_path, "--receive-timeout", "0.5") as door, ExitStack() as stack:
        sent = request(body=b" " * 100_000 + BODY)
        client = begun(door, sent[:60_000], stack=stack, within_s=0.5)
        for at in range(60_000, len(sent), 10_000):
            time.sleep(0.25)
            client.send(sent[at : at + 10_000])

        assert client.answer().status == 200


def test_an_answer_may_take_longer_than_a_head(tmp_path):
    """Deadlines are for what the client sends; what it has sent behind a stream has its time when it is its turn."""
    stream = json.dumps({"prompt": "a", "max_tokens": 8, "stream": True}).encode()
    with front(tmp_path, "--receive-timeout", "0.3", token_s=0.15) as door:
        found = late_answers(door, request(body=stream) + request()[:-5], within_s=0.3)

    assert [one.status for one in found] == [200, 408]


@pytest.mark.parametrize("path", ["/nowhere", PATH])
def test_a_body_that_nobody_wants_has_its_time_too(hasty, path):
    """It was answered before it was complete."""
    # Of a body that is read here, more than the protocol collects by itself.
    sent = request(path, b"x" * 20_000_000)[: 70_000 if path == PATH else 20_000]
    found = late_answers(hasty, sent)

    assert [one.status for one in found] == [404 if path != PATH else 413]


def test_time_outs_are_counted(tmp_path):
    """Apart, for heads and for bodies."""
    with front(tmp_path, "--receive-timeout", "0.2") as door:
        for sent in (LINE, request()[:-1]):
            while not (found := door.ask(sent)):
                door.too_late += 1
            assert [one.status for one in found] == [408]
        assert door.ask() == []
        assert (door.refused("body_timeout"), door.refused("head_timeout")) == (1, 2 + door.too_late)


# Connections


@pytest.mark.parametrize("kind", ["http", "tls"])
def test_there_is_a_limit_of_connections(tmp_path, kind):
    """One more is told so, and closed; when others leave there is room."""
    with front_of(kind, tmp_path, "--max-connections", "3") as door, ExitStack() as stack:
        kept = [stack.enter_context(door.open()) for _ in range(3)]
        for client in kept:
            assert client.send(request()).answer().status == 200
        with door.open() as client:
            found = client.answers()
        assert [one.status for one in found] == [503]
        assert found[0].headers["retry-after"] == "5"
        assert "max_connections" in json.loads(found[0].body)["error"]["message"]
        assert kept[0].send(request()).answer().status == 200
        for client in kept[1:]:
            client.sock.close()
        until(lambda: [one.status for one in door.ask(request(lines=(JSON, "Connection: close")))] == [200])
        kept[0].send(request("/metrics", method="GET"))
        assert b'pdrelay_connections_refused_total{reason="max_connections"}' in kept[0].answer().body


def test_there_is_a_limit_for_one_address(tmp_path):
    """Another one is not touched by it."""
    with front(tmp_path, "--max-connections-per-address", "2") as door, ExitStack() as stack:
        mine = [stack.enter_context(door.open(address="127.0.0.2")) for _ in range(2)]
        for client in mine:
            assert client.send(request()).answer().status == 200
        with door.open(address="127.0.0.2") as client:
            found = client.answers()
        assert [one.status for one in found] == [503]
        assert "max_connections_per_address" in json.loads(found[0].body)["error"]["message"]
        assert door.serves()
        assert door.refused("max_connections_per_address") == 1


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", ["http", "tls"])
def test_too_many_connections_for_its_descriptors_do_no_harm(tmp_path, kind):
    """It does not spin, and serves again when they have gone; TLS: none of them says a word of its handshake."""
    with front_of(kind, tmp_path, "--receive-timeout", "2", hard=110) as door:
        with ExitStack() as stack:
            for _ in range(250):
                stack.enter_context(RawClient(door.port))
            before = cpu_s(door.process.child.pid)
            time.sleep(1)
            assert cpu_s(door.process.child.pid) - before < 0.5
        until(door.serves)


def test_the_soft_limit_of_descriptors_is_raised(tmp_path):
    """The usual 1,024 are for programs that call select."""
    with front(tmp_path, soft=200) as door:
        said = Path(f"/proc/{door.process.child.pid}/limits").read_text()

    soft, hard = re.search(r"Max open files +(\S+) +(\S+)", said).groups()
    assert soft == hard


# Bytes


def rss(door):
    """What the router's process holds, in bytes."""
    status = Path(f"/proc/{door.process.child.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024


UNFINISHED = {
    "declared": lambda size: request(body=b"x" * size)[:-1],
    "chunked": lambda size: chunked(b"x" * size)[:-5],
    "chunked, small": lambda size: chunked(b"x" * size, size=1000)[:-5],
    "for FastAPI": lambda size: request("/tokenize", b"x" * size)[:-1],
    "a form": lambda size: request(
        "/v1/audio/transcriptions", b"x" * size, lines=("Content-Type: multipart/form-data; boundary=x",)
    )[:-1],
}


@pytest.mark.slow  # 60 MB to a router of its own
@pytest.mark.parametrize("shape", UNFINISHED)
def test_bodies_are_charged_while_they_come(tmp_path, shape):
    """Forty that are not complete hold no more than max_inflight_bytes; and all of it is given back."""
    flags = ("--max-inflight-bytes", "16000000", "--max-body-bytes", "4000000")
    with front(tmp_path, *flags) as door:
        assert door.serves()
        before = rss(door)
        with ExitStack() as stack:
            clients = [stack.enter_context(door.open()) for _ in range(30)]
            for client in clients:
                client.send(UNFINISHED[shape](2_000_000))
            until(lambda: door.metric("pdrelay_requests_refused_total", reason="max_inflight_bytes") >= 20, seconds=40)
            assert rss(door) - before < 16_000_000 + 24_000_000  # each of 30 connections has a buffer or two
            found = [client.answer() for client in clients if readable(client)]
        assert len(found) >= 20
        assert {one.status for one in found} == {503}
        assert {json.loads(one.body)["error"]["message"] for one in found} == {
            "the router holds as many bytes of requests as it may (max_inflight_bytes)"
        }
        body = json.dumps({"prompt": "x" * 3_000_000, "max_tokens": 2}).encode()
        whole = request(body=body, lines=(JSON, "Connection: close"))
        until(lambda: door.status(whole) == 200, seconds=40)  # it hears of the end of the others a little later
        for _ in range(6):
            assert door.status(whole) == 200


@pytest.mark.slow  # a router of its own, and 130 MB through its sockets
def test_many_prompts_hold_their_common_fields_once(tmp_path):
    """64 prompts with a field of 1 MB, for two legs each: each leg held a copy, and its socket another one."""
    with front(tmp_path, "--max-inflight-bytes", "80000000") as door:
        assert door.serves()
        before = rss(door)
        most = 0
        fields = {"max_tokens": 2, "user": "u" * 1_000_000}
        body = json.dumps({"prompt": ["x"] * 64, **fields}).encode()
        with probed(door) as probe, door.open() as client:
            client.sock.settimeout(120)
            client.send(request(body=body))
            while not readable(client):
                most = max(most, rss(door) - before)
            assert client.answer().status == 200
        assert most < 10_000_000  # 2 MB: the body and its fields; a copy for each of the legs would be 128 MB
        assert probe.took[-1] < 2.0
        longer = json.dumps({"prompt": ["x"] * 64, **fields, "user": "u" * 1_300_000}).encode()
        assert door.status(request(body=longer, lines=(JSON, "Connection: close"))) == 413


def readable(client):
    client.sock.settimeout(0.02)
    try:
        client.incoming.left += client.sock.recv(1)
    except TimeoutError:
        return False
    client.sock.settimeout(20)
    return True


# Floods

MIB64 = 64 * 1024 * 1024
FLOODS = {
    "headers": (LINE, b"a: b\r\n" * 40_000),
    "a header value": (LINE + b"a: ", b"x" * 250_000),
    "a URL": (b"POST /v1/", b"x" * 250_000),
    "a declared body": (request(length=False, body=b"", lines=(JSON, f"Content-Length: {MIB64}")), b"x" * 250_000),
    "a chunked body": (request(length=False, body=b"", lines=CHUNKED), b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000)),
    "chunks of two bytes": (request(length=False, body=b"", lines=CHUNKED), b"2\r\nab\r\n" * 30_000),
    "chunks of 64 bytes": (request(length=False, body=b"", lines=CHUNKED), b"40\r\n%b\r\n" % (b"x" * 64) * 3000),
    "chunk extensions": (request(length=False, body=b"", lines=CHUNKED), b"1;%b\r\na\r\n" % (b"a" * 2000) * 100),
    "trailers": (chunked()[:-2], b"a: b\r\n" * 40_000),
    "pipelined requests": (b"", request("/health", method="GET") * 4000),
    "a form": (
        request(
            "/v1/audio/transcriptions",
            b"",
            length=False,
            lines=("Content-Type: multipart/form-data; boundary=x", f"Content-Length: {MIB64}"),
        ),
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * 4000,
    ),
}
ADMITTED = 8_000_000  # bytes of one body, in these tests


class Probe(threading.Thread):
    """Asks for /health all the while, on a connection of its own.

    ``took`` is how long each answer took, without the time that the router or the probe waited for a core: others had
    it. ``slowest`` is the longest of them with it.
    """

    def __init__(self, door):
        super().__init__()
        self.door, self.took, self.slowest, self.over = door, [], 0.0, threading.Event()

    def run(self):
        threads = self.door.process.child.pid, threading.get_native_id()
        with self.door.open() as client:
            while not self.over.is_set():
                waited = sum(map(waited_s, threads))
                start = time.perf_counter()
                assert client.send(request("/health", method="GET")).answer().status == 200
                took = time.perf_counter() - start
                self.slowest = max(self.slowest, took)
                self.took.append(took - (sum(map(waited_s, threads)) - waited))
                time.sleep(0.002)


@pytest.fixture(scope="module")
def flooded(tmp_path_factory):
    """A router that has served what it admits: the memory that such a body leaves behind is not what a flood costs."""
    admitted = json.dumps({"prompt": "x" * (ADMITTED - 1000), "max_tokens": 1}).encode()
    with front(tmp_path_factory.mktemp("flooded"), "--max-body-bytes", str(ADMITTED)) as found:
        for sent in (request(body=admitted), chunked(admitted)):
            with found.open() as client:
                assert client.send(sent).answer().status == 200
        yield found


@contextmanager
def probed(door):
    """Yield a probe that has the times of /health at the end, in order."""
    probe = Probe(door)
    probe.start()
    try:
        yield probe
    finally:
        probe.over.set()
        probe.join()
        probe.took.sort()


def flood_with(door, start, piece):
    """Send 64 MB, or until the router hangs up; return the most that the router held meanwhile."""
    most = 0
    with door.open() as client:
        client.sock.settimeout(2)
        client.send(start)
        for _ in range(MIB64 // len(piece)):
            try:
                client.sock.sendall(piece)
            except (ConnectionError, TimeoutError):
                break
            most = max(most, rss(door))
    return most


@pytest.mark.timeout(600)  # a minute for each try on a busy machine
@pytest.mark.slow  # 64 MB in chunks of 64 bytes are a million of them
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_costs_neither_memory_nor_the_others_their_time(flooded, flood):
    """64 MB of it: no more than what is admitted is held, and /health answers as if nothing were.

    What others do on this machine delays a probe, too: it may take three times what it takes without a flood, and there
    are three tries. A router that stands still does so in each of them.
    """
    before = rss(flooded)
    for _ in range(3):
        with probed(flooded) as calm:
            time.sleep(0.2)
        with probed(flooded) as probe:
            assert flood_with(flooded, *FLOODS[flood]) - before < ADMITTED + 16_000_000
        took = probe.took
        bound = max(0.05, 3 * calm.slowest)
        if took[len(took) // 2] < 0.05 and took[len(took) * 99 // 100] < bound:
            return
    raise AssertionError(f"/health took {took[len(took) // 2]:.3f} s, 99 % {took[len(took) * 99 // 100]:.3f} s")
