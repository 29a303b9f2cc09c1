"""Whatever engines do, and however requests come: one answer, one line, the client's own bytes, and nothing left over.

A scene is a few requests of one client and engines that recite what they answer, or fail, byte for byte.
"""

import asyncio
import json
import re
from itertools import pairwise

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from support.reciting import Act, End, prefilled, whole
from support.scenes import Scene, Sent, declared, post, text, values_of
from support.searching import examples

pytestmark = pytest.mark.edges


@pytest.fixture(scope="module")
def runner():
    """One event loop for all scenes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as found:
        yield found


PART = re.compile(r"-p\d+$")  # the id of a request for one of several prompts, which has a line of its own


def play(runner, scene):
    """Play a scene, and see that the router owes nobody anything."""
    seen = runner.run(scene.play())

    assert seen.bugs == []
    assert [got.status for got in seen.got if got.status < 200] == []  # each request has its answer
    assert len(seen.got) == len(scene.requests)
    assert set(seen.held.values()) == {0}, seen.held
    followed = [got.status for got, sent in zip(seen.got, scene.requests, strict=True) if is_followed(sent)]
    own = [fact["status"] for fact in seen.facts if not PART.search(fact["request_id"])]
    assert sorted(own) == sorted(followed)
    for heard in seen.heard:
        if b'"abandoned_transfer_id"' in heard.body:  # the router's own: another of several prompts was refused
            continue
        assert any(is_clients(heard, sent) for sent in scene.requests), heard
    return seen


def parts(sent):
    """Return the target of a request, and its body without chunks."""
    head, _, body = b"".join(packet for _, packet in sent.packets).partition(b"\r\n\r\n")
    if b"Transfer-Encoding: chunked" in head:
        whole_body = b""
        while size := int((line := body.partition(b"\r\n"))[0], 16):
            whole_body += line[2][:size]
            body = line[2][size + 2 :]
        body = whole_body
    return head.split(b" ", 2)[1].decode(), body


def is_object(body):
    """Tell whether this is a JSON object."""
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def is_followed(sent):
    """Tell whether a request gets a line of the log."""
    path = parts(sent)[0].partition("?")[0]
    return path.startswith("/v1/") or path in ENDPOINTS


# What the router takes out of a request or puts into it, for both legs and for the prefill leg.
PRIVATE = {"kv_transfer_params", "ec_transfer_params"}
ADDED = {*PRIVATE, "request_id", "return_token_ids"}
ONE_TOKEN = {"max_tokens", "min_tokens", "max_completion_tokens", "max_output_tokens", "n", "stream", "store"}
# A priority is sent as the whole number that vLLM makes of it (core/admission/priority.py).
WHOLE_NUMBERS = {b"-0.0": b"0", b"1.0": b"1", b"true": b"1"}
ONLY_FOR_DECODE = {"stream_options", "best_of", "use_beam_search", "prompt_logprobs", "logprobs"}


def is_clients(heard, sent):
    """Tell whether an engine got what this request says, each value byte for byte."""
    target, body = parts(sent)
    if heard.line != b"POST %b HTTP/1.1" % target.partition("?")[0].encode() or not is_object(body):
        return False
    asked, got = values_of(body), values_of(heard.body)
    is_changed = ADDED | (ONE_TOKEN | ONLY_FOR_DECODE if heard.engine.startswith("prefill") else set())
    if b"kv_transfer_params" in asked.get("vllm_xargs", b""):
        is_changed |= {"vllm_xargs"}
    kept, came = ({name: each[name] for name in each if name not in is_changed} for each in (asked, got))
    if "priority" in kept:
        kept["priority"] = WHOLE_NUMBERS.get(kept["priority"], kept["priority"])
    return kept == came or any(kept | {"prompt": one} == came for one in several(kept.get("prompt", b"")))


def several(prompt):
    """Return each of several prompts, byte for byte: each is asked for by itself."""
    try:
        return [bytes(one) for one in msgspec.json.decode(prompt, type=list[msgspec.Raw])]
    except msgspec.MsgspecError:
        return []


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
# How an answer may be spoiled: what comes in place of its head or within it.
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
    (b"content-length: ", b"transfer-encoding: chunked\r\ncontent-length: "),
    (b"transfer-encoding: chunked", b"content-length: 5\r\ntransfer-encoding: chunked"),
    (b"\r\n", b"\r\ncontent-encoding: gzip\r\n"),
    (b"\r\n", b"\nx-one: 1\n"),
    (b"\r\n", b"\r\nx-folded: 1\r\n folded\r\n"),
    (b"\r\n", b"\r\nx-big: " + b"y" * 70_000 + b"\r\n"),
    (b"HTTP/1.1 200 Said\r\n", b"HTTP/1.0 200 Said\r\n"),
    # llhttp skips empty lines before an answer, as HTTP wants it of servers
    (b"HTTP/1.1 200 Said\r\n", b"\r\nHTTP/1.1 200 Said\r\n"),
    (
        b"transfer-encoding: chunked\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    ),
    (b"HTTP/1.1 200 Said\r\n", b"HTTP/2.0 200 Said\r\n"),
    (b"HTTP/1.1 200 Said\r\n", b"HTTP/3.7 200 Said\r\n"),
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
        raw = re.sub(rb"content-length: \d+\r\n", b"", raw, count=1)
        end = End.CLOSE
    fate = draw(st.integers(0, 23))
    if fate in (20, 21, 22):
        old, new = draw(st.sampled_from(SPOILED))
        # After it nothing may come that could be taken for more of it, or for the next answer.
        raw = raw.replace(old, new, 1)
        end = End.CLOSE
    elif fate in (16, 17, 18):
        raw = raw[: len(raw) * draw(st.integers(0, 999)) // 1000]
        end = draw(st.sampled_from([End.CLOSE, End.RESET]))
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
            + [{"resume_streams": True}, {"retries": 0}]
            + [{"min_split_new_bytes": 100}, {"decode_only_fallback": False}, {"max_body_bytes": 60}]
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


@pytest.mark.slow  # 150 scenes, of a tenth of a second each
@pytest.mark.timeout(900)  # all of it is work of this process: a minute, or five beside other chains of tests
@given(scene=scenes())
@example(scene=Scene((ordinary(), ordinary(stream=True)), {"prefill": (), "decode": ()}, BOTH))
@hypothesis_settings(max_examples=examples(150), derandomize=True, database=None, suppress_health_check=CHECKS, **QUICK)
def test_each_request_gets_one_answer_and_leaves_nothing_behind(runner, scene):
    """Whatever becomes of its legs, and however it comes."""
    play(runner, scene)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of a scene that fails
@given(scene=scenes())
@hypothesis_settings(max_examples=2000, suppress_health_check=CHECKS, **QUICK)
def test_the_same_in_many_more_scenes(runner, scene):
    """Others each time."""
    play(runner, scene)


STALLED = b"HTTP/1.1 200 Said\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"one"}]}\n\n'


def early_loop():
    """Make an event loop whose timers go off 0.2 s too early: others are early by less than a millisecond."""
    loop = asyncio.SelectorEventLoop()
    loop._clock_resolution = 0.2
    return loop


def test_a_timer_that_is_early_does_not_blame_the_engine():
    """The limit that was reached is named, though the clock has not reached it."""
    started = STALLED + b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    acts = {"prefill": (), "decode": (Act(((0.0, started), (4.0, b""))),)}
    alone = {"prefill": (True,), "decode": (True,)}
    scene = Scene((ordinary(stream=True),), acts, alone, {"stream_idle_timeout_s": 1.5, "retries": 0})

    with asyncio.Runner(loop_factory=early_loop) as runner:
        (got,) = runner.run(scene.play()).got

    assert "sent nothing for 1.5 s" in got.body.decode()
