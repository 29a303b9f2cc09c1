"""One client request, two engine requests."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import Api, InstanceId, RequestId, TransferId
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.prefill_answer import kv_params
from pdrelay_proxy.core.protocol.request_bodies import decode_body, named, prefill_fields, with_ids
from pdrelay_proxy.core.raw_json import encode

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "transfer_id": "xfer-1",
}


PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-x-0-00000000",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


def prefilled(api, body):
    return json.loads(encode(prefill_fields(api, parse(json.dumps(body).encode()), TransferId("xfer-1"))))


def test_a_completion_is_prefilled_with_one_token():
    """Not streamed, for a stream carries no kv_transfer_params; the prompt and its shapers stay."""
    body = {"model": "m", "prompt": "hi", "max_tokens": 64, "min_tokens": 8, "stream": True, "cache_salt": "s"}

    assert prefilled(Api.COMPLETIONS, body) == {
        "model": "m",
        "prompt": "hi",
        "cache_salt": "s",
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": ASK,
    }


def test_a_chat_is_limited_in_both_spellings():
    """max_completion_tokens wins over max_tokens, and either may be missing."""
    for body in ({}, {"max_tokens": 9}, {"max_completion_tokens": 9}):
        made = prefilled(Api.CHAT, {"messages": []} | body)

        assert (made["max_tokens"], made["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize(
    "name",
    [
        "stream_options",
        "best_of",
        "use_beam_search",
        "prompt_logprobs",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
    ],
)
def test_what_only_decode_needs_is_left_out_of_prefill(name):
    """stream_options without stream is an error, and logprobs of a token nobody sees cost time."""
    assert name not in prefilled(Api.CHAT, {"messages": [], name: 1})


@pytest.mark.parametrize(
    "name",
    [
        *("tools", "tool_choice", "response_format", "chat_template", "chat_template_kwargs", "documents"),
        *(
            "cache_salt",
            "add_generation_prompt",
            "truncate_prompt_tokens",
            "mm_processor_kwargs",
            "model",
            "unheard_of",
        ),
    ],
)
def test_what_shapes_the_prompt_is_kept(name):
    """Another prompt would mean another KV cache, and wrong text with status 200."""
    assert prefilled(Api.CHAT, {"messages": [], name: {"any": "thing"}})[name] == {"any": "thing"}


def test_a_prefill_makes_one_sequence():
    """A number that says more is replaced; null is left for the engine to judge."""
    assert prefilled(Api.COMPLETIONS, {"prompt": "hi", "n": 3})["n"] == 1
    assert prefilled(Api.COMPLETIONS, {"prompt": "hi", "n": None})["n"] is None
    assert "n" not in prefilled(Api.COMPLETIONS, {"prompt": "hi"})


numbers = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["1e400", "-0.0", "0.10", "1E+2", "123456789012345678901234567890", "1.0e-400"]),
)
strings = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(json.dumps),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(lambda s: json.dumps(s, ensure_ascii=False)),
    st.sampled_from([r'"\u00e9"', r'"\/"', r'"\ud83d\ude00"', '"\U0001f600"', r'"\u0000"']),
)
texts = st.recursive(
    st.one_of(numbers, strings, st.sampled_from(["true", "false", "null"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + " , ".join(items) + "]"),
        st.lists(st.tuples(strings, inner), max_size=3).map(
            lambda items: "{" + ",".join(f"{key}: {value}" for key, value in items) + "}"
        ),
    ),
    max_leaves=6,
)
private = {"kv_transfer_params", "ec_transfer_params", "vllm_xargs"}
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name not in private)
members = st.lists(st.tuples(names, texts), max_size=6)


def write(pairs):
    return ("{ " + " ,\n".join(f"{json.dumps(name)} : {text}" for name, text in pairs) + " }").encode()


@given(pairs=st.lists(st.tuples(names, texts), max_size=6, unique_by=lambda pair: pair[0]))
def test_decode_gets_the_clients_values_byte_for_byte(pairs):
    """Big integers, floats beyond range, escapes and unknown fields included; names keep their order."""
    text = b'{"kv_transfer_params":' + json.dumps(PARAMS).encode() + b"}"
    made = decode_body(parse(write(pairs)), kv_params(InstanceId("prefill-0"), text)[0])
    fields = msgspec.json.decode(made, type=dict[str, msgspec.Raw])

    carried = fields.pop("kv_transfer_params")
    assert [(name, bytes(raw).decode()) for name, raw in fields.items()] == pairs
    assert bytes(carried) == json.dumps(PARAMS).encode()


@given(pairs=members)
def test_the_last_of_equal_names_counts_on_both_legs(pairs):
    """As it does in Python's json, which vLLM uses; two engines that choose differently would be a wrong answer."""
    fields = parse(write(pairs))
    wanted = dict(pairs)

    decoded = msgspec.json.decode(encode(fields), type=dict[str, msgspec.Raw])
    assert {name: bytes(raw).decode() for name, raw in decoded.items()} == wanted
    legs = msgspec.json.decode(
        encode(prefill_fields(Api.COMPLETIONS, fields, TransferId("xfer-1"))), type=dict[str, msgspec.Raw]
    )
    assert all(bytes(legs[name]).decode() == text for name, text in wanted.items() if name not in ASKED)


ASKED = {"max_tokens", "min_tokens", "stream", "n", "stream_options", "logprobs"}


def test_prefill_of_token_ids_keeps_the_sampling_parameters():
    """But for the limits, which are among them: logprobs and the like are checked by the prefill engine."""
    body = {"token_ids": [1], "sampling_params": {"seed": 7, "logprobs": 2, "min_tokens": 4, "max_tokens": 9}}
    more = {"stream": True, "stream_options": {}}
    fields = parse(json.dumps(body | more).encode())
    made = json.loads(encode(prefill_fields(Api.GENERATE, fields, TransferId("x"))))

    assert made.pop("kv_transfer_params")["do_remote_decode"] is True
    once = {"seed": 7, "logprobs": 2, "min_tokens": 1, "max_tokens": 1}
    assert made == {"token_ids": [1], "sampling_params": once, "stream": False}


@pytest.mark.parametrize(
    ("api", "one"),
    [
        (Api.RESPONSES, {"max_output_tokens": 1, "store": False}),
        (Api.MESSAGES, {"max_tokens": 1}),
    ],
)
def test_prefill_of_the_other_apis_only_gets_what_they_know(api, one):
    """An unknown field may be refused some day; what they know beside it is kept."""
    client = {"model": "m", "stream": True, "top_logprobs": 2, "n": 3, "max_output_tokens": 9, "max_tokens": 9}
    made = json.loads(encode(prefill_fields(api, parse(json.dumps(client).encode()), TransferId("x"))))

    params = made.pop("kv_transfer_params")
    assert (params["do_remote_decode"], params["transfer_id"]) == (True, "x")
    assert made == client | {"stream": False, **one, "n": 1}


def test_only_responses_are_named_in_the_body():
    """The other engines take the name from X-Request-Id; and a client's own name is replaced where it stands."""
    fields = parse(b'{"request_id":"mine","input":"a"}')

    assert encode(named(Api.RESPONSES, fields, RequestId("r"))) == b'{"request_id":"resp_r","input":"a"}'
    for api in set(Api) - {Api.RESPONSES}:
        assert named(api, fields, RequestId("r")) == fields


def test_tokens_are_added_to_parameters_that_stay_as_they_came():
    """To the byte: the engine's own numbers and blanks are not ours to rewrite."""
    params = msgspec.Raw(b'{"a": 1.50, "b" : [ ] } ')

    assert bytes(with_ids(params, msgspec.Raw(b"[1, 2]"))) == b'{"a": 1.50, "b" : [ ] ,"prompt_token_ids":[1, 2]}'
