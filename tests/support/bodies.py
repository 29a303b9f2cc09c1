"""Bodies for every field of vLLM's own request models, good, doubtful and broken: a hypothesis strategy."""

import json
import warnings

from hypothesis import strategies as st

from pdrelay_proxy.core.model import Api

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "a quiet river"}]
BASE = {
    Api.COMPLETIONS: {"model": "tiny", "prompt": "a quiet river", "max_tokens": 3},
    Api.CHAT: {"model": "tiny", "messages": USER, "max_tokens": 3},
    Api.RESPONSES: {"model": "tiny", "input": "a quiet river", "max_output_tokens": 3, "store": False},
    Api.MESSAGES: {"model": "tiny", "messages": USER, "max_tokens": 3},
    Api.GENERATE: {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}},
}
# Values that some field takes.
GOOD = [
    True, False, 0, 1, 2, 3, 0.5, 1.0, "x", "auto", "none", "required", "json", [], ["x", "y"], [1, 2], {}, USER,
    [TOOL], [[1, 2, 3], [4, 5]], [{"role": "user", "content": [{"type": "text", "text": "t"}]}],
    {"include_usage": True}, {"type": "json_object"}, {"1": 0.5}, {"choice": ["a", "b"]}, {"regex": "[ab]"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}, {"enable_thinking": True},
    {"max_tokens": 3, "logprobs": 2, "n": 2}, {"max_tokens": 4, "stop_token_ids": [1]},
]  # fmt: skip
# Values that hardly any does.
BAD = [
    None, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 1e-300, "", "\x00", "\ud83d\ude00", "\ud800", "nan",
    "a" * 5000, [None], [[]], [[[1]]], [{}], {"": ""}, {"a": {"b": {"c": [1, {"d": None}]}}}, [-1], [2**40], [0.5],
    "x\ny", ["\x00"], [""] * 30, {"type": "no such thing"}, {"do_remote_prefill": True}, {"role": "user"},
    [{"role": "nobody", "content": 1}], {"regex": "(((("}, {"grammar": "root ::= root"}, {"json": "{"},
    {"structural_tag": "x"}, {"choice": []},
    {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
]  # fmt: skip
UNKNOWN = ["kv_transfer_params", "ec_transfer_params", "no_such_field", "__proto__", "model", "n", "best_of", "input"]
# Values that would only keep the engines busy: a test of 2,000 bodies has no time for them.
LONG = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"}
SHORT = [0, 1, 2, 4, -1, "4", 2.5, 10**9, [4], {"a": 1}]


def fields():
    """Return the names of all fields of all request models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing vLLM warns of is not ours
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return {
        Api.COMPLETIONS: sorted(CompletionRequest.model_fields),
        Api.CHAT: sorted(ChatCompletionRequest.model_fields),
        Api.RESPONSES: sorted(ResponsesRequest.model_fields),
        Api.MESSAGES: sorted(AnthropicMessagesRequest.model_fields),
        Api.GENERATE: sorted(GenerateRequest.model_fields),
    }


def bodies():
    """Generate (path, bytes): mostly JSON with up to five fields set to something, now and then broken bytes."""
    known = fields()
    return st.sampled_from(list(Api)).flatmap(lambda api: st.tuples(st.just(api.value), _raw(api, known[api])))


def _raw(api, names):
    anything = st.one_of(st.sampled_from(GOOD), st.sampled_from(GOOD), st.sampled_from(BAD), _deep())
    field = st.sampled_from([*names, *UNKNOWN]).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(SHORT) if name in LONG else anything)
    )
    whole = st.lists(field, max_size=5).map(lambda chosen: {**BASE[api], **dict(chosen)}).map(_encode)
    return st.one_of(*[whole] * 9, st.tuples(whole, st.integers(0, 200), st.binary(max_size=3)).map(_broken))


def _encode(body):
    return json.dumps(body).encode()


def _broken(parts):
    """Overwrite some bytes."""
    raw, where, junk = parts
    where %= len(raw)
    return raw[:where] + junk + raw[where + 1 :]


def _deep():
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=8,
    )
