"""The hot path, the ordinary one and the one by way of httpx are one router: what differs is a bug.

A scene is a few requests of one client and engines that recite what they answer, or fail, byte for byte. It is played
by a fresh router of each kind. What the client gets, what the engines get, what the log says of each request and what
the counters show must be the same.
"""

import asyncio
import os
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from support.reciting import Act, End, prefilled, reciting, whole
from support.two_ways import WAYS, Scene, Sent, answer, declared, post, routing, text

# What httpx makes of an answer is another thing, and on purpose: tests/proxy/io/test_engines_contract.py says why. The
# two ways that send their legs by our own client are compared all the same.
ONLY_OURS = (b"x-differs: 1",)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """One event loop for all scenes; no time is spent on reading the authorities of the system for each router."""
    none = tmp_path_factory.mktemp("tls") / "none.pem"
    none.touch()
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        patch.setenv("SSL_CERT_FILE", str(none))
        patch.setenv("SSL_CERT_DIR", str(none.parent))
        yield runner


def play(runner, scene):
    """Play a scene each way, and compare."""
    hot, plain, httpx = (runner.run(scene.by(way)) for way in ("hot", "plain", "httpx"))

    for seen in (hot, plain, httpx):
        assert seen.bugs == []
    assert hot == plain
    if not any(mark in packet for mark in ONLY_OURS for packet in said(scene)):
        assert as_by_httpx(hot) == as_by_httpx(httpx)
    return hot


def the_same_for_the_client(runner, scene):
    """Play a scene each way, and compare what the client gets, and what the log says of it."""
    each = [as_by_httpx(runner.run(scene.by(way))) for way in ("hot", "plain", "httpx")]

    assert [seen.bugs for seen in each] == [[], [], []]
    assert each[0].got == each[1].got == each[2].got
    assert each[0].facts == each[1].facts == each[2].facts
    return each[0]


def said(scene):
    return [b"".join(packet for _, packet in act.packets) for acts in scene.acts.values() for act in acts]


def as_by_httpx(seen):
    """Leave out what httpx says of itself, and say of an answer that is not HTTP what is said where httpx is in use."""

    def heard(each):
        return [replace(one, headers=tuple(pair for pair in one.headers if pair[0] != b"connection")) for one in each]

    return replace(
        seen,
        got=[replace(got, body=_in_other_words(got.body.decode("latin-1")).encode("latin-1")) for got in seen.got],
        heard=heard(seen.heard),
        releases=heard(seen.releases),
        facts=[{name: _in_other_words(str(fact)) for name, fact in facts.items()} for facts in seen.facts],
        said=[_in_other_words(line) for line in seen.said],
    )


def _in_other_words(sentence):
    unclear = r"answered with something that is not HTTP/1\.1: [^\"\\]*"
    return re.sub(unclear, "broke off before its answer was complete", sentence)


# Requests


PATHS = (
    [b"/v1/completions"] * 6 + [b"/v1/chat/completions"] * 4 + [b"/v1/responses", b"/v1/messages", b"/v1/embeddings"]
)
NUMBERS = ["0.1", "1e-7", "0.30000000000000004", "1E400", "-0.0", "123456789012345678901234567890", "1.0", "0"]
WORDS = ['"plain"', '"\\u00e9\\ud83d\\ude00"', '"\u00e9\U0001f600 \u2028"', '"a\\/b\\"c"', '""', '"\\ud800"']
VALUES = st.sampled_from([*NUMBERS, *WORDS, "null", "true", "[]", "{}", '{"a": [1, 2.50, {"b": null}]}', "[[1,2],[3]]"])
SAID = '[{"role": "user", "content": "%s"}]'
PROMPTS = st.sampled_from(
    [
        *WORDS[:3] * 3,
        '["one"]',
        '["one", "two"]',
        "[1, 2, 3]",
        "[[1, 2]]",
        "null",
        "7",
        *('"' + "x" * size + '"' for size in (5000, 9000, 70_000)),
    ]
)
FIELDS = st.one_of(
    st.tuples(st.just("max_tokens"), st.sampled_from(["2", "16", "64", "1", "null", "2.0", '"4"'])),
    st.tuples(st.just("n"), st.sampled_from(["1", "2", "null"])),
    st.tuples(st.sampled_from(["temperature", "seed", "top_p", "x_new", "user", "stop", "logprobs"]), VALUES),
    st.tuples(st.just("model"), st.sampled_from(['"m"', '"other"', "null", "3"])),
    st.tuples(st.just("stream_options"), st.sampled_from(['{"include_usage": true}', "null"])),
    st.tuples(
        st.sampled_from(["max_completion_tokens", "max_output_tokens", "min_tokens"]), st.sampled_from(["1", "8"])
    ),
    st.tuples(st.sampled_from(["echo", "use_beam_search", "background", "store", "ignore_eos"]), VALUES),
    st.tuples(st.sampled_from(["best_of", "prompt_logprobs", "truncate_prompt_tokens"]), st.sampled_from(["1", "2"])),
    st.tuples(st.sampled_from(["kv_transfer_params", "ec_transfer_params"]), st.sampled_from(["null", "null", "{}"])),
    st.tuples(
        st.just("vllm_xargs"),
        st.sampled_from(["null", '{"a": 1.50}', '{"kv_transfer_params": {"a": 1}, "b": 2}', "[}"]),
    ),
    st.tuples(st.sampled_from(["request_id", "priority", "stream", "prompt"]), VALUES),
)
ODD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"a": 1,}',
    b"{} {}",
    b" { } ",
    b"{}",
]
LINES = st.sampled_from(
    [
        b"Content-Type: application/json",
        b"Content-Type: application/json; charset=utf-8",
        b"content-type: text/plain",
        b"Authorization: Bearer abc",
        b"X-Request-Id: mine",
        b"X-Request-Id: a b",
        b"X-Session-ID: s-1",
        b"X-data-parallel-rank: 0",
        b"X-data-parallel-rank: one",
        b"X-vLLM-Priority: 3",
        b"X-vLLM-Priority: high",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        b"Accept: text/event-stream",
        b"X-Other: \xe9",
        b"Accept-Encoding: gzip",
        b"Cookie: a=b",
        b"Connection: keep-alive",
    ]
)
LAST = st.sampled_from([()] * 12 + [(b"Connection: close",), (b"Expect: 100-continue",)])
PAUSES = st.sampled_from([0.0] * 6 + [0.0005, 0.003])


@st.composite
def bodies(draw, path, streams):
    """Draw a JSON object, mostly of what such a path wants, in any order and with any spaces, or none at all."""
    if draw(st.integers(0, 19)) == 19:
        return draw(st.sampled_from(ODD_BODIES))
    pairs = draw(st.lists(FIELDS, max_size=4))
    if path == b"/v1/completions":
        pairs.insert(draw(st.integers(0, len(pairs))), ("prompt", draw(PROMPTS)))
    else:
        name = "input" if path in (b"/v1/responses", b"/v1/embeddings") else "messages"
        pairs.insert(0, (name, draw(st.sampled_from(['"hello"', *(SAID % text for text in ("h\\u00e9", "y" * 9000))]))))
    if streams:
        pairs.insert(draw(st.integers(0, len(pairs))), ("stream", "true"))
    space, colon = draw(st.sampled_from([("", ":"), (" ", ": "), ("\n\t ", " : ")]))
    return ("{" + space + f",{space}".join(f'"{name}"{colon}{value}' for name, value in pairs) + space + "}").encode(
        "utf-8", "surrogatepass"
    )


@st.composite
def packets(draw, data):
    """Cut bytes anywhere, and pause anywhere in between."""
    if not data:
        return ()
    cuts = sorted({len(data) * part // 1000 for part in draw(st.lists(st.integers(0, 999), max_size=4))} - {0})
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return tuple((draw(PAUSES) if cuts else 0.0, part) for part in parts)


@st.composite
def requests(draw, streams):
    """Draw what a client sends: nearly always a POST, in one or more packets."""
    path = draw(st.sampled_from(PATHS))
    body = draw(bodies(path, streams))
    lines = list({line.split(b":")[0].lower(): line for line in draw(st.lists(LINES, max_size=3))}.values())
    lines += draw(LAST)
    way = draw(st.integers(0, 29))
    if way == 29:
        raw = draw(
            st.sampled_from(
                [
                    b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n",
                    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
                    post(body, path=b"/v1/nothing"),
                    post(body, path=path + b"?a=b"),
                    post(body, path=path + b"/"),
                    post(body, b"Connection: close", start=b"POST %b HTTP/1.0" % path),
                ]
            )
        )
    elif way == 28:
        half = len(body) // 2
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
        said = b"Host: localhost", *declared(lines), b"Transfer-Encoding: chunked"
        head = b"\r\n".join([b"POST %b HTTP/1.1" % path, *said, b"", b""])
        raw = head + pieces + b"0\r\n\r\n"
    else:
        raw = post(body, *lines, path=path)
    return Sent(draw(packets(raw)))


# What engines say

JSON, SSE = b"application/json", b"text/event-stream"
KINDS = st.sampled_from([JSON] * 4 + [b"application/json; charset=utf-8", b"text/plain", b"", b"TEXT/JSON"])
STREAM_KINDS = st.sampled_from([SSE] * 4 + [b"text/event-stream; charset=utf-8", b"Text/Event-Stream", JSON, b""])
ERRORS = [
    b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}',
    b'{"error":"Unauthorized"}',
    b'{"detail":"Not Found"}',
    b"<html>busy</html>",
    b"",
    b"\xff\x00",
]
STATUSES = [400, 400, 401, 404, 408, 413, 422, 429, 500, 500, 502, 503, 503, 504, 302, 201, 204, 304, 418, 599]
PREFILLS = st.sampled_from(
    [
        prefilled(remote_block_ids=[]),
        prefilled(remote_engine_id=None),
        prefilled(remote_port=None),
        prefilled(do_remote_prefill=False),
        prefilled(remote_host=""),
        prefilled(extra={"a": 1.5}, remote_port=0),
        b'{"id": "x"}',
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": []}',
        b"not JSON",
        b"",
        b"{",
        b'{"usage": {"prompt_tokens": 9}, "kv_transfer_params":' + prefilled().partition(b'"kv_transfer_params":')[2],
    ]
)
WHOLES = st.sampled_from(
    [
        b'{"id":"cmpl-2","choices":[{"text":"one"}],"usage":{"prompt_tokens":4}}',
        b'{"id":"cmpl-2", "choices":[], "usage":{"prompt_tokens":5}}',
        b'{"error":{"message":"in a 200","code":500}}',
        b"",
        b"junk",
        b"x" * 70_000,
    ]
)
ENDS_OF_EVENTS = [
    b"data: [DONE]\n\n",
    b"data: [DONE]\n\n",
    b"data: [DONE]\n\n",
    b"data: [DONE]",
    b"data: [DONE]\r\n\r\n",
    b"",
    b"data: {",
    b'data: {"error":{"message":"it broke","code":500}}\n\ndata: [DONE]\n\n',
    b"data: [DONE]\n\nmore",
    b"event: message_stop\ndata: {}\n\n",
    b"event: error\ndata: {}\n\n",
]
EVENTS = st.sampled_from(
    [
        b'data: {"choices":[{"text":"one"}]}\n\n',
        b'data: {"choices":[{"text":"\xc3\xa9\xf0\x9f\x98\x80"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":4}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":5}}\n\n',
        b'data:{"choices":[{"text":"no space"}]}\r\n\r\n',
        b": a comment\n\n",
        b"event: response.created\ndata: {}\n\n",
        b"event: message_start\ndata: {}\n\n",
        b"id: 7\nretry: 10\n\n",
        b"data: two\ndata: lines\n\n",
        b"\n",
        b"\r",
        b"data: " + b"x" * 9000 + b"\n\n",
    ]
)
FIRST_ERRORS = st.sampled_from(
    [
        b'data: {"error":{"message":"no","type":"BadRequestError","code":400}}\n\n',
        b'data: {"error":{"message":"no","code":503}}\n\n',
        b'data: {"error":{"message":"no"}}\n\n',
        b'data: {"error":null}\n\n',
        b'data: {"error":{"message":"no","code":"400"}}\n\n',
    ]
)
BEFORE_A_RESET = (0.003, b"")  # an RST may overtake what was sent before it
# How an answer may be spoiled: what comes in place of its head or within it, and whether httpx differs on purpose.
SPOILED = [
    (b"HTTP/1.1 ", b"HTTX/1.1 "),
    (b"HTTP/1.1 200", b"HTTP/1.1 two"),
    (b"HTTP/1.1 200", b"HTTP/1.1 20"),
    (b"HTTP/1.1 ", b"junk\r\nHTTP/1.1 "),
    (b"HTTP/1.1 ", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 "),
    (b"HTTP/1.1 ", b"HTTP/1.1 103 Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 "),
    (b"HTTP/1.1 ", b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nHTTP/1.1 "),
    (b"\r\n", b"\r\nno colon\r\n"),
    (b"\r\n", b"\r\nx y: z\r\n"),
    (b"\r\n", b"\r\nx-null: a\0b\r\n"),
    # httpx gives up when it has 100 KiB and no end, and reads 64 KiB at a time: less than both may be there in time
    (b"\r\n", b"\r\nx-big: " + b"y" * 200_000 + b"\r\n"),
    (b"\r\n", b"\r\nset-cookie: a=b\r\nset-cookie: c=d\r\nlocation: /x\r\n"),
    (b"\r\n", b"\r\nconnection: close\r\n"),
    (b"\r\n", b"\r\nConnection: Keep-Alive\r\nkeep-alive: timeout=5\r\n"),
    (b"content-type", b"content-type: text/x\r\ncontent-type"),
    (b"content-length: ", b"content-length: -"),
    (b"content-length: ", b"content-length: 1"),
    (b"content-length: ", b"content-length: 99999999999999999999"),
    (b"content-length: ", b"content-length: 0x"),
    (b"content-length: ", b"content-length: 3\r\ncontent-length: "),
    (b"transfer-encoding: chunked", b"transfer-encoding: gzip"),
    (b"transfer-encoding: chunked\r\n\r\n", b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
    (b"transfer-encoding: chunked\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n-1\r\n"),
    (b"transfer-encoding: chunked\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n1;a=b\r\n\n\r\n"),
    (b"\r\n0\r\n\r\n", b"\r\n0\r\nx-trailer: a\r\n\r\n"),
    (b"\r\n0\r\n\r\n", b"\r\n0\r\n"),
    (b"\r\n0\r\n\r\n", b"x\r\n0\r\n\r\n"),
]
SPOILED_FOR_US = [
    (b"content-length: ", b"x-differs: 1\r\ntransfer-encoding: chunked\r\ncontent-length: "),
    (b"transfer-encoding: chunked", b"x-differs: 1\r\ncontent-length: 5\r\ntransfer-encoding: chunked"),
    (b"\r\n", b"\r\nx-differs: 1\r\ncontent-encoding: gzip\r\n"),
    (b"\r\n", b"\nx-differs: 1\n"),
    (b"\r\n", b"\r\nx-differs: 1\r\n folded\r\n"),
    (b"\r\n", b"\r\nx-differs: 1\r\nx-big: " + b"y" * 70_000 + b"\r\n"),
    (b"HTTP/1.1 200 Said\r\n", b"HTTP/1.0 200 Said\r\nx-differs: 1\r\n"),
    # llhttp skips empty lines before an answer, as HTTP wants it of servers; h11, under httpx, takes them for junk
    (b"HTTP/1.1 200 Said\r\n", b"\r\nHTTP/1.1 200 Said\r\nx-differs: 1\r\n"),
    # h11 takes a size of up to 20 digits, and what comes then for the beginning of that chunk
    (
        b"transfer-encoding: chunked\r\n\r\n",
        b"x-differs: 1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    ),
    (b"HTTP/1.1 200 Said\r\n", b"HTTP/2.0 200 Said\r\nx-differs: 1\r\n"),
    (b"HTTP/1.1 200 Said\r\n", b"HTTP/3.7 200 Said\r\nx-differs: 1\r\n"),
]


def chunked(body, kind, at, status=200):
    """Return an answer in chunks that end at these places."""
    cuts = sorted({len(body) * part // 1000 for part in at} | {0, len(body)})
    parts = [body[a:b] for a, b in pairwise(cuts)]
    head = b"HTTP/1.1 %d Said\r\n%btransfer-encoding: chunked\r\n\r\n"
    lines = b"content-type: %b\r\n" % kind if kind else b""
    return head % (status, lines) + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


@st.composite
def acts(draw, role, streams):
    """Draw what an engine does with a request: half of the time what it should."""
    status, kind, body = draw(answers(role, streams))
    framing = draw(st.sampled_from(["length", "length", "chunks", "chunks", "chunks", "end"]))
    if framing == "chunks" and status not in (204, 304):
        raw = chunked(body, kind, draw(st.lists(st.integers(0, 1000), max_size=4)), status)
    else:
        raw = whole(b"" if status in (204, 304) else body, status=status, kind=kind)
    end = End.KEEP
    if framing == "end" and status not in (204, 304):
        raw, end = re.sub(rb"content-length: \d+\r\n", b"", raw, count=1), End.CLOSE
    fate = draw(st.integers(0, 23))
    if fate in (20, 21):
        old, new = draw(st.sampled_from(SPOILED))
        # After it nothing may come that could be taken for more of it, or for the next answer.
        raw, end = raw.replace(old, new, 1), End.CLOSE
    elif fate == 22:
        old, new = draw(st.sampled_from(SPOILED_FOR_US))
        raw, end = raw.replace(old, new, 1), End.CLOSE
    elif fate in (16, 17, 18):
        raw, end = raw[: len(raw) * draw(st.integers(0, 999)) // 1000], draw(st.sampled_from([End.CLOSE, End.RESET]))
        return Act((*draw(packets(raw)), BEFORE_A_RESET), end)
    elif fate == 19:  # and does not say so before; a reset would come later, perhaps after the next request
        end = End.CLOSE
    elif fate == 23:
        return Act((), End.RESET, unread=True)
    return Act(draw(packets(raw)), end)


@st.composite
def answers(draw, role, streams):
    """Draw a status, a content type and a body."""
    wrong = draw(st.integers(0, 9))
    if wrong == 9:
        return draw(st.sampled_from(STATUSES)), draw(KINDS), draw(st.sampled_from(ERRORS))
    if role == "prefill":
        return 200, draw(KINDS), prefilled() if wrong < 7 else draw(PREFILLS)
    if streams != (wrong == 8):
        body = b"".join(draw(st.lists(EVENTS, max_size=5)))
        if wrong in (5, 6):
            body = draw(FIRST_ERRORS) + body
        return 200, draw(STREAM_KINDS), body + draw(st.sampled_from(ENDS_OF_EVENTS))
    return 200, draw(KINDS), draw(WHOLES)


@st.composite
def scenes(draw):
    """Draw one to three requests, and engines for them."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    streams = kinds[0]
    sent = tuple(draw(requests(streams)) for _ in kinds)  # so that engines say what fits most of them
    each = {role: tuple(draw(st.lists(acts(role, streams), max_size=4))) for role in ("prefill", "decode")}
    up = {
        role: draw(st.sampled_from([(True,)] * 3 + [(True, True)] * 4 + [(False, True), (True, False), (False,)]))
        for role in ("prefill", "decode")
    }
    options = draw(
        st.sampled_from(
            [{}] * 6
            + [{"resume": True}, {"retries": 0}, {"reuse_tokens": True}, {"client_kv_params": "strip"}]
            + [{"min_prompt_chars": 100}, {"alone_without_prefill": False}, {"max_body_bytes": 60}]
        )
    )
    # A router that closes a connection with more requests in it resets it, and the answer may get lost.
    at_once = draw(st.integers(0, 7)) == 7 and "max_body_bytes" not in options and not any(map(_closes, sent))
    return Scene(sent, each, up, options, at_once=at_once)


def _closes(sent):
    raw = b"".join(packet for _, packet in sent.packets)
    return b"Connection: close" in raw or b"Expect" in raw


def ordinary(**fields):
    return Sent(((0.0, post(text(**fields), b"Content-Type: application/json")),))


BOTH = {"prefill": (True, True), "decode": (True, True)}
QUICK = {"deadline": None, "report_multiple_bugs": False, "phases": [Phase.explicit, Phase.generate, Phase.shrink]}
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.mark.timeout(300)
@given(scene=scenes())
@example(scene=Scene((ordinary(), ordinary(stream=True)), {"prefill": (), "decode": ()}, BOTH))
@hypothesis_settings(max_examples=150, derandomize=True, database=None, suppress_health_check=CHECKS, **QUICK)
def test_what_happens_is_the_same_whichever_way_a_request_goes(runner, scene):
    """For the client, the engines, the log and the counters."""
    play(runner, scene)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of a scene that fails
@given(scene=scenes())
@hypothesis_settings(max_examples=2000, suppress_health_check=CHECKS, **QUICK)
def test_what_happens_is_the_same_in_many_more_scenes(runner, scene):
    """Others each time."""
    play(runner, scene)


# What needs a certain order, or time

PUSHED = Act(((0.0, prefilled(transfer_mode="push", remote_request_id="cmpl-@ID@-0-0123abcd")),), named=True)
STALLED = b"HTTP/1.1 200 Said\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"one"}]}\n\n'
REFUSED = Act(((0.0, whole(ERRORS[0], status=400)),))
BROKEN = Act(((0.0, b"HTTP/1.1 200 Said\r\n"), BEFORE_A_RESET), End.RESET)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((PUSHED,), ()), ((REFUSED,), ()), ((BROKEN,), ()), ((PUSHED,), (REFUSED,)), ((PUSHED,), (BROKEN,))],
    ids=["good", "prefill refuses", "prefill breaks off", "decode refuses", "decode breaks off"],
)
def test_both_legs_at_once_are_the_same_whichever_way(runner, stream, prefill, decode):
    """What an engine hears of a leg that is dropped is a matter of time; what the client gets is not."""
    begun, done = STALLED + b"%x\r\n%b\r\n" % (len(EVENT), EVENT), b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    late = Act(((0.05, begun), (0.001, done)))  # by then the prefill leg has come to its end
    acts = {"prefill": (PUSHED, *prefill, PUSHED), "decode": (late, *decode, late, late)}
    scene = Scene((ordinary(stream=stream),) * 2, acts, {"prefill": (True,), "decode": (True,)})

    seen = the_same_for_the_client(runner, scene)

    assert seen.facts[0].get("route") or seen.facts[1].get("route")


@pytest.mark.parametrize(
    ("acts", "limit", "says"),
    [
        ({"prefill": (Act(((6.0, b""),)),)}, "prefill_timeout_s", "did not answer within 1 s"),
        ({"decode": (Act(((0.0, STALLED), (6.0, b""))),)}, "first_token_timeout_s", "sent no token within 1 s"),
        (
            {"decode": (Act(((0.0, STALLED + b"%x\r\n%b\r\n" % (len(EVENT), EVENT)), (6.0, b""))),)},
            "idle_timeout_s",
            "sent nothing for 1 s",
        ),
        (
            {"decode": (Act(((0.0, STALLED + b"%x\r\n%b\r\n" % (len(EVENT), EVENT)), (6.0, b""))),)},
            "stream_timeout_s",
            "the stream was not complete within 1 s",
        ),
    ],
    ids=["prefill", "first token", "next token", "whole stream"],
)
def test_patience_ends_the_same_whichever_way(runner, acts, limit, says):
    """Each limit, with engines that say nothing more for six times as long.

    The limit of a stream counts from the request's beginning: were it shorter, a machine that does something else for
    so long would have it pass before the first event, which is another answer.
    """
    alone = {"prefill": (True,), "decode": (True,)}
    scene = Scene((ordinary(stream=True),), {"prefill": (), "decode": ()} | acts, alone, {limit: 1.0, "retries": 0})

    (got,) = the_same_for_the_client(runner, scene).got

    assert says in got.body.decode()


def early_loop():
    """Make an event loop whose timers go off 0.2 s too early: others are early by less than a millisecond."""
    loop = asyncio.SelectorEventLoop()
    loop._clock_resolution = 0.2
    return loop


@pytest.mark.parametrize("way", ["hot", "plain", "httpx"])
def test_a_timer_that_is_early_does_not_blame_the_engine(way):
    """The limit that was reached is named, though the clock has not reached it."""
    started = STALLED + b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    acts = {"prefill": (), "decode": (Act(((0.0, started), (4.0, b""))),)}
    alone = {"prefill": (True,), "decode": (True,)}
    # the stream has to begin 0.2 s before that, however busy the machine is
    scene = Scene((ordinary(stream=True),), acts, alone, {"stream_timeout_s": 1.5, "retries": 0})

    with asyncio.Runner(loop_factory=early_loop) as runner:
        (got,) = runner.run(scene.by(way)).got

    assert "the stream was not complete within 1.5 s" in got.body.decode()


async def _asked_beside_a_stray(way):
    """Ask twice; before the router looks again, the second request waits, and an answer nobody asked the engine for."""
    up = {"prefill": (True,), "decode": (True,)}
    async with reciting({"prefill": (), "decode": ()}, up) as cast, routing(cast, WAYS[way]) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(text()))
        await answer(reader)
        os.write(writer.get_extra_info("socket").fileno(), post(text()))
        os.write(cast.idle_at("prefill"), whole(prefilled(remote_engine_id="stray")))
        got = await answer(reader)
        writer.transport.abort()
    return got.status, [b"stray" in heard.body for heard in cast.heard]


@pytest.mark.parametrize("way", WAYS)
def test_what_an_engine_sends_unasked_is_nobodys_answer(runner, way):
    """A decode engine would read the blocks of another request. Both wait at the same time: the order is chance."""
    for _ in range(5):
        assert runner.run(_asked_beside_a_stray(way)) == (200, [False] * 4)
