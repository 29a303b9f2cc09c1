"""Bodies for every field of vLLM's own request models, good, doubtful and broken, drawn by chance."""

import functools
import json
import warnings

from pdrelay_proxy.core.model import Api

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": FUNCTION["parameters"]}}
USER = [{"role": "user", "content": "a quiet river"}]
BASE = {
    Api.COMPLETIONS: {"model": "tiny", "prompt": "a quiet river", "max_tokens": 3},
    Api.CHAT: {"model": "tiny", "messages": USER, "max_tokens": 3},
    Api.RESPONSES: {"model": "tiny", "input": "a quiet river", "max_output_tokens": 3, "store": False},
    Api.MESSAGES: {"model": "tiny", "messages": USER, "max_tokens": 3},
    Api.GENERATE: {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "temperature": 0}},
}
# Values that a field takes, or refuses by itself.
OWN = {
    "temperature": [0, 0.0], "seed": [1, 7], "n": [1, 2, 3], "logprobs": [0, 1, 5, 25, True], "top_logprobs": [1, 25],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}], "echo": [True],
    "prompt": ["é🦊", ["a", "b c"], [5, 6], [[5], [6, 7]], [600], "river " * 40, "river " * 900, [7] * 65],
    "input": ["river " * 40], "token_ids": [[7] * 65],
    "messages": [[*USER, {"role": "assistant", "content": "é"}], [{"role": "system", "content": "🦊"}, *USER]],
    "stop": ["e", ["a", " "], [""]], "stop_token_ids": [list(range(70, 130))], "include_stop_str_in_output": [True],
    "logit_bias": [{"40": 50}, {"600": 1}], "allowed_token_ids": [[70, 71, 80], [600]], "bad_words": [["e", "é"]],
    "min_tokens": [1, 2, 9], "ignore_eos": [True], "prompt_logprobs": [0, 2], "truncate_prompt_tokens": [1, 2, -1],
    "structured_outputs": [{"choice": ["é", "no"]}, {"regex": "[ab]{3}"}, {"regex": "(("}],
    "response_format": [{"type": "json_object"}, SCHEMA, {"type": "json_schema"}],
    "tools": [[TOOL]], "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "return_token_ids": [True], "return_tokens_as_token_ids": [True], "add_generation_prompt": [False],
    "continue_final_message": [True], "repetition_penalty": [1.3], "presence_penalty": [1.5], "top_k": [1, 5],
    "stop_sequences": [["e"]], "sampling_params": [{"max_tokens": 4, "temperature": 0, "logprobs": 2}],
}  # fmt: skip
# Values that some field takes.
GOOD = [
    True, False, 0, 1, 2, 3, 0.5, 1.0, "x", "auto", "none", "json", [], ["x", "y"], [1, 2], {}, [TOOL], {"1": 0.5},
    [{"role": "user", "content": [{"type": "text", "text": "t"}]}], {"type": "json_object"}, {"enable_thinking": True},
]  # fmt: skip
# Values that hardly any does.
BAD = [
    None, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 1e-300, "", "\x00", "\ud83d\ude00", "\ud800", "nan",
    "a" * 5000, [None], [[]], [[[1]]], [{}], {"": ""}, {"a": {"b": {"c": [1, {"d": None}]}}}, [-1], [2**40], [0.5],
    "x\ny", ["\x00"], [""] * 30, {"type": "no such thing"}, {"do_remote_prefill": True}, {"role": "user"},
    [{"role": "nobody", "content": 1}], {"grammar": "root ::= root"}, {"json": "{"}, {"structural_tag": "x"},
    {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
]  # fmt: skip
UNKNOWN = ["kv_transfer_params", "ec_transfer_params", "no_such_field", "__proto__", "model", "n", "best_of", "input"]
# Values that would only keep the engines busy: a test of 2,000 bodies has no time for them.
LONG = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
SHORT = [0, 1, 2, 8, -1, "4", 2.5, 10**9]


@functools.cache
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


def draw(random):
    """Return a path and a body: JSON with up to five fields set to something, now and then with broken bytes."""
    api = random.choice(list(Api))
    names = fields()[api]
    own = [name for name in names if name in OWN]
    body = {**BASE[api], "stream": random.random() < 0.5}
    if api is not Api.GENERATE:
        body["temperature"] = 0
    is_odd = random.random() < 0.3
    for _ in range(random.randrange(6)):
        if is_odd and random.random() < 0.5:
            name = random.choice([*names, *UNKNOWN])
            body[name] = random.choice(SHORT if name in LONG else random.choice([GOOD, BAD]))
        else:
            name = random.choice(own)
            body[name] = random.choice(OWN[name])
    raw = json.dumps(body).encode()
    if random.random() < 0.05:
        at = random.randrange(len(raw))
        raw = raw[:at] + random.randbytes(random.randrange(4)) + raw[at + 1 :]
    return api.value, raw
