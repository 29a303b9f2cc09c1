"""The bodies we make, read by vLLM's own request models.

vLLM is the other party of this contract: a field that is new to it fails here, until somebody has decided what the
two legs do with it.
"""

import json
import warnings

import pytest

from xpyd_proxy.core.dialect import decode_body, kv_params, parse, prefill_body
from xpyd_proxy.core.model import Api, InstanceId, TransferId
from xpyd_proxy.core.routing import solo_reason
from xpyd_proxy.errors import BadRequest

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
TRANSFER = TransferId("xfer-1")
BASE = {Api.COMPLETIONS: {"prompt": "hi"}, Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}

# A body for every field of both models; where a field needs others beside it, they are here too.
BODIES = {
    "add_generation_prompt": {"add_generation_prompt": False},
    "add_special_tokens": {"add_special_tokens": True},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "bad_words": {"bad_words": ["x"]},
    "cache_salt": {"cache_salt": "salt"},
    "chat_template": {"chat_template": "{{ messages }}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
    "echo": {"echo": True},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "ignore_eos": {"ignore_eos": True},
    "include_reasoning": {"include_reasoning": False},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "length_penalty": {"length_penalty": 0.5},
    "logit_bias": {"logit_bias": {"1": 0.5}},
    "logprob_token_ids": {"logprob_token_ids": [1, 2], "logprobs": 1},
    "logprobs": {"logprobs": 1},
    "max_completion_tokens": {"max_completion_tokens": 9},
    "max_tokens": {"max_tokens": 9},
    "media_io_kwargs": {"media_io_kwargs": {"image": {"a": 1}}},
    "messages": {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    "min_p": {"min_p": 0.1},
    "min_tokens": {"min_tokens": 4},
    "mm_payload": {"mm_payload": "none"},
    "mm_processor_kwargs": {"mm_processor_kwargs": {"a": 1}},
    "model": {"model": "a-lora"},
    "n": {"n": 2},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": [TOOL]},
    "presence_penalty": {"presence_penalty": 0.5},
    "priority": {"priority": 3},
    "prompt": {"prompt": [1, 2, 3]},
    "prompt_embeds": {"prompt_embeds": "AAAA"},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "reasoning_effort": {"reasoning_effort": "high"},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
    },
    "repetition_penalty": {"repetition_penalty": 1.5},
    "request_id": {"request_id": "the client's"},
    "response_format": {"response_format": {"type": "json_object"}},
    "return_mm_kwargs": {"return_mm_kwargs": True},
    "return_prompt_text": {"return_prompt_text": True},
    "return_token_ids": {"return_token_ids": True},
    "return_token_offsets": {"return_token_offsets": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 1},
    "seed": {"seed": 2**63 - 1},
    "session_id": {"session_id": "s"},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "stop": {"stop": ["x", "y"]},
    "stop_token_ids": {"stop_token_ids": [1]},
    "stream": {"stream": True},
    "stream_interval": {"stream_interval": 2},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
    "suffix": {"suffix": "x"},
    "temperature": {"temperature": 0.0},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "tool_choice": {"tool_choice": "required", "tools": [TOOL]},
    "tools": {"tools": [TOOL]},
    "top_k": {"top_k": 5},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "top_p": {"top_p": 0.5},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "truncation_side": {"truncation_side": "left"},
    "use_beam_search": {"use_beam_search": True},
    "user": {"user": "u"},
    "vllm_xargs": {"vllm_xargs": {"a": [1, "b"]}},
    "watermarking": {"watermarking": True},
}
SOLO = {"echo", "n", "prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search"}
REFUSED = {"kv_transfer_params", "ec_transfer_params"}
OF_ONE_LEG = {"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", "kv_transfer_params"} | {
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "request_id",  # drawn at random by the model when it is not given
}
ODD = [None, True, False, -1, 0, 1, 2, 1.5, 2.0, "", "1", "x", [], [1], ["x"], {}, {"a": 1}, {"include_usage": "x"}]


@pytest.fixture(scope="module")
def models():
    """vLLM's models; importing vLLM warns about things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    return {Api.COMPLETIONS: CompletionRequest, Api.CHAT: ChatCompletionRequest}


@pytest.fixture(autouse=True)
def quiet():
    """The models warn about deprecated fields when those are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def body_with(api, name):
    body = BASE[api] | BODIES[name]
    if api is Api.CHAT and "logprobs" in body:
        body["logprobs"] = True
    return body


def read(model, raw):
    """Validate as vLLM's server does; None if it would refuse (its validators raise all sorts of things)."""
    try:
        return model.model_validate(json.loads(raw))
    except Exception:
        return None


@pytest.mark.parametrize("api", Api)
def test_every_field_has_been_considered(models, api):
    """A new vLLM version may bring a field that must not reach the prefill leg, or must not be split."""
    fields = set(models[api].model_fields)

    assert not fields - set(BODIES) - REFUSED


@pytest.mark.parametrize("api", Api)
def test_prefill_reads_what_the_client_wrote_and_makes_one_token(models, api):
    """Both legs agree in every field but those of one leg; otherwise the prompts could differ."""
    for name in BODIES.keys() & models[api].model_fields.keys():
        raw = json.dumps(body_with(api, name)).encode()
        fields = parse(raw, strip_private=False)
        client, prefill = read(models[api], raw), read(models[api], prefill_body(api, fields, TRANSFER))

        assert client is not None, name
        assert prefill is not None, name
        assert (prefill.max_tokens, prefill.min_tokens, prefill.stream, prefill.n) == (1, 1, False, 1), name
        assert (prefill.stream_options, prefill.logprobs or None) == (None, None), name
        assert api is Api.COMPLETIONS or prefill.max_completion_tokens == 1, name
        assert (solo_reason(api, fields) is not None) == (name in SOLO), name
        if name not in SOLO:
            for field in models[api].model_fields.keys() - OF_ONE_LEG:
                assert getattr(prefill, field) == getattr(client, field), (name, field)


@pytest.mark.parametrize("api", Api)
def test_decode_reads_all_of_what_the_client_wrote(models, api):
    """And, beside it, where the KV cache is."""
    answer = json.dumps({"kv_transfer_params": PARAMS}).encode()
    for name in BODIES.keys() & models[api].model_fields.keys():
        raw = json.dumps(body_with(api, name)).encode()
        made = decode_body(parse(raw, strip_private=False), kv_params(InstanceId("prefill-0"), answer))
        client, decode = read(models[api], raw), read(models[api], made)

        assert decode.kv_transfer_params == PARAMS, name
        for field in models[api].model_fields.keys() - {"kv_transfer_params", "request_id"}:
            assert getattr(decode, field) == getattr(client, field), (name, field)


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_decode_would_refuse_is_not_prefilled(models, api, value):
    """vLLM frees the blocks of a refused decode leg only if it got past reading the body.

    So a body that the models refuse must be refused by the prefill engine as well, or must not be split.
    """
    for name in models[api].model_fields:
        raw = json.dumps(BASE[api] | {name: value}).encode()
        try:
            fields = parse(raw, strip_private=False)
        except BadRequest:
            continue
        if read(models[api], raw) is None and solo_reason(api, fields) is None:
            assert read(models[api], prefill_body(api, fields, TRANSFER)) is None, name


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_odd_spelling_slips_through(models, api, value):
    """vLLM reads "2" as 2 and 1 as true; what it would not split in plain spelling is not split in an odd one."""
    for name in models[api].model_fields:
        raw = json.dumps(BASE[api] | {name: value}).encode()
        try:
            fields = parse(raw, strip_private=False)
        except BadRequest:
            continue
        client = read(models[api], raw)
        if client is None or solo_reason(api, fields) is not None:
            continue
        assert (client.n or 1, client.use_beam_search, bool(client.echo)) == (1, False, False), name
        assert client.prompt_logprobs is None
        assert client.truncate_prompt_tokens is None
        limit = client.max_tokens if api is Api.COMPLETIONS else client.max_completion_tokens or client.max_tokens
        assert limit is None or limit > 1
