"""The first token of a prefill engine, and the stream of a decode engine behind it: one answer, in whatever pieces."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.raw_json import encode, maybe
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.features.first_token.core.first_token import Spliced, first_token, may_show, offered
from pdrelay_proxy.features.first_token.schemas import FirstTokenOffer
from support.greedy import events, first_answer, ids_of, read

OFFER = FirstTokenOffer(("completions", "chat"), 4096)
BASE = {"stream": True, "temperature": 0, "max_tokens": 8}
BODIES = {
    Api.COMPLETIONS: BASE | {"prompt": "once"},
    Api.CHAT: BASE | {"messages": [{"role": "user", "content": "go on"}]},
}
USAGE = {"stream_options": {"include_usage": True}}


def fields_of(body):
    return parse(json.dumps(body).encode())


def token_of(api, body, **changes):
    answer = first_answer(body | {"return_token_ids": True}, name="cmpl-r") | changes
    said = maybe(json.dumps(answer).encode(), TokensAnswer)
    return first_token(api, fields_of(body), OFFER, said, (answer.get("usage") or {}).get("prompt_tokens"))


def rest_of(first, body, name="cmpl-r"):
    """The decode engine's stream."""
    fields = first.decode_fields(fields_of(body), msgspec.Raw(b'{"remote_port":1}'))
    return list(events(json.loads(encode(fields)), name=name))


def cut(data, at):
    """Cut into pieces of whole lines, as core/protocol/sse.py lets them pass."""
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    places = [0, *sorted({ends[each % len(ends)] for each in at} - {len(data)}), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


@given(
    api=st.sampled_from([*BODIES]),
    change=st.sampled_from([{}, USAGE, {"max_tokens": 2}, {"stop_token_ids": [1], "min_tokens": 2} | USAGE]),
    at=st.lists(st.integers(0, 60), max_size=12),
    name=st.sampled_from(["cmpl-r", "cmpl-r-r1"]),
    comment=st.booleans(),
)
def test_the_pieces_do_not_matter(api, change, at, name, comment):
    """One id, one time, one usage, one role: whatever the decode engine calls its answer, and however it comes."""
    body = BODIES[api] | change
    first = token_of(api, body)
    stream = b"".join(rest_of(first, body, name))
    spliced = Spliced(first)
    begun = first.events()
    shown = begun + b"".join(spliced.feed(piece) for piece in cut((b": hm\n\n" if comment else b"") + stream, at))

    whole = b"".join(events(body, name="cmpl-r"))
    assert read(shown) == read(whole)
    chunks = [json.loads(line[6:]) for line in shown.splitlines() if line.startswith(b"data: {")]
    assert {chunk["created"] for chunk in chunks} == {6}
    assert shown.count(b'"role"') == whole.count(b'"role"')
    assert b"\n\n\n" not in shown
    assert all(event.count(b"data:") <= 1 for event in shown.split(b"\n\n"))


def test_a_text_with_the_words_of_an_event_is_left_alone():
    """Its quotes are escaped."""
    first = token_of(Api.COMPLETIONS, BODIES[Api.COMPLETIONS])
    head = {"id": "x", "created": 7}
    text = 'a "id":"x", and "usage":{ and "created":7, too'
    spliced = Spliced(first)
    shown = [spliced.feed(b"data: " + json.dumps(head | {"choices": [{"text": each}]}, separators=(",", ":")).encode())
             for each in (text, text)]  # fmt: skip

    assert [json.loads(line[6:])["choices"][0]["text"] for line in shown] == [text, text]
    assert {json.loads(line[6:])["id"] for line in shown} == {"cmpl-r"}


def test_an_engine_that_writes_its_json_in_another_way_is_understood():
    """Slower: each of its events is parsed."""
    body = BODIES[Api.CHAT] | USAGE
    first = token_of(Api.CHAT, body)
    spaced = [b"data: " + json.dumps(json.loads(one[6:])).encode() + b"\n\n" for one in rest_of(first, body)[:-1]]
    spliced = Spliced(first)
    shown = first.events() + b"".join(map(spliced.feed, [*spaced, b"data: [DONE]\n\n"]))

    assert read(shown) == read(b"".join(events(body, name="cmpl-r")))


@pytest.mark.parametrize(("cached", "expected"), [(0, 0), (5, 5), (6, 5)])
def test_what_was_cached_is_told_of_the_clients_prompt(cached, expected):
    """A decode engine that has loaded all of it has loaded one token more than one that is asked for the first."""
    first = token_of(Api.COMPLETIONS, BODIES[Api.COMPLETIONS])
    usage = {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14}
    details = {"prompt_tokens_details": {"cached_tokens": cached, "more": 1}}
    chunk = {"id": "x", "created": 7, "choices": [], "usage": usage | details, "metrics": {"a": 1}}
    spliced = Spliced(first)
    spliced.feed(b'data: {"id":"x","created":7,"choices":[{"text":"a"}]}\n\n')
    said = json.loads(spliced.feed(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")[6:])

    assert said["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": expected, "more": 1},
    }
    assert said["metrics"] == {"a": 1}


@pytest.mark.parametrize("api", BODIES)
def test_another_engine_is_asked_while_nothing_else_is_shown(api):
    """Then it is too late: what it makes might differ."""
    body = BODIES[api]
    first = token_of(api, body)
    spliced = Spliced(first)
    stream = rest_of(first, body)
    if api is Api.CHAT:
        assert spliced.feed(stream.pop(0)) == b""
    asked = json.loads(encode(spliced.again()))

    assert ids_of(asked) == [*ids_of(body), first.token]
    assert asked["max_tokens"] == 7
    assert "remote_port" not in asked.get("kv_transfer_params", {})
    assert spliced.feed(stream[0])
    assert spliced.again() is None


def test_an_end_has_the_fingerprint_where_vllm_has_it():
    """On the last event with a choice, or on that with the usage."""
    for options, place in (({}, 0), (USAGE, 1)):
        body = BODIES[Api.COMPLETIONS] | options | {"stop_token_ids": [27]}
        shown = token_of(Api.COMPLETIONS, body, system_fingerprint="fp").events().splitlines()
        said = [json.loads(line[6:]) for line in shown if line.startswith(b"data: {")]

        assert [chunk.get("system_fingerprint") for chunk in said] == [*[None] * place, "fp"]


@pytest.mark.parametrize(
    ("offer", "expected"),
    [
        ({"apis": ["chat"], "max_model_len": 5}, FirstTokenOffer(("chat",), 5)),
        ({"apis": ["chat"], "max_model_len": 5.0}, FirstTokenOffer(("chat",), 5)),
        ({"apis": ["chat"], "max_model_len": 5.5}, None),
        (None, None),
        ({}, None),
        ({"apis": "chat", "max_model_len": 5}, None),
        ({"apis": [], "max_model_len": 0}, None),
    ],
    ids=repr,
)
def test_an_offer_is_whole_or_none(offer, expected):
    """What is odd is as if nothing had been said."""
    assert offered(msgspec.Raw(json.dumps(offer).encode())) == expected


@pytest.mark.parametrize(("api", "apis"), [(Api.CHAT, ["completions"]), (Api.COMPLETIONS, ["chat"])])
def test_an_offer_for_another_api_is_none(api, apis):
    """An engine with a reasoning parser offers completions alone."""
    assert not may_show(api, fields_of(BODIES[api]), FirstTokenOffer(tuple(apis), 4096))
