"""A decode engine that gets a prompt as token ids answers as if it had rendered and tokenized the prompt itself.

The router relies on that for every request that it splits. Here vLLM's own renderer makes the engine's input both
ways; what it makes beside it, and what reads that, is what ``may_pass_ids`` and ``takes_chat_ids`` go by.
"""

import ast
import inspect
import json
import textwrap
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm import __version__ as vllm_version
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.prompt_ids import ids_in, may_pass_ids, read_with_ids, takes_chat_ids
from pdrelay_proxy.core.protocol.request_bodies import decode_pieces_with_ids
from pdrelay_proxy.core.raw_json import NULL, encode
from pdrelay_proxy.core.schemas import PromptIdsAnswer
from pdrelay_tools.local.model import ensure_model

pytestmark = [
    pytest.mark.timeout(240),  # importing vLLM takes half a minute on a busy machine
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated"),  # of vLLM, about its own field
]

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
HELLO = [{"role": "user", "content": "hello \u00e4\u4f60 world"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
IMAGE = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
CHATS = {
    "plain": {"messages": HELLO},
    "several": {"messages": [{"role": "system", "content": "be kind"}, *HELLO, {"role": "assistant", "content": "hi"}]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "continued": {
        "messages": [*HELLO, {"role": "assistant", "content": "hi"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "tools": {"messages": HELLO, "tools": [TOOL], "tool_choice": "none"},
    "salt": {"messages": HELLO, "cache_salt": "s"},
    "special tokens": {"messages": HELLO, "add_special_tokens": True},
}
TEXTS = {
    "plain": {"prompt": "hello \u00e4\u4f60 world"},
    "salt": {"prompt": "hello", "cache_salt": "s"},
    "no special tokens": {"prompt": "hello", "add_special_tokens": False},
    "one in a list": {"prompt": ["hello"]},
}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    """What an API server renders with, of the tiny model."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    ensure_model(path)
    config = EngineArgs(model=str(path), enforce_eager=True, max_model_len=1024).create_engine_config()
    inner = renderer_from_config(config)
    return OnlineRenderer(
        config.model_config, inner, request_logger=None, chat_template=None, chat_template_content_format="auto"
    )


def asked_with_ids(api, body, ids):
    """Return the router's decode leg: what a prefill engine has told goes in as it came."""
    fields = parse(json.dumps(body).encode())
    told = json.dumps({"prompt_token_ids": ids, "choices": [{}], "kv_transfer_params": PARAMS}, separators=(",", ":"))
    if api is Api.COMPLETIONS:
        told = json.dumps({"choices": [{"prompt_token_ids": ids}], "kv_transfer_params": PARAMS}, separators=(",", ":"))
    read = read_with_ids(told.encode(), PromptIdsAnswer)
    return json.loads(b"".join(decode_pieces_with_ids(api, fields, read.kv_transfer_params, ids_in(read))))


def shown(engine_input):
    """Return what reaches the engine: when it came is no part of the answer, and nothing reads the text but an echo."""
    return {name: value for name, value in engine_input.items() if name not in {"arrival_time", "prompt"}}


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
async def test_a_chats_ids_make_the_same_input(renderer, body):
    """Whatever its messages say; and the key is gone, so that a connector does not see it."""
    body = {"model": "m", **body}
    _, (plain,) = await renderer.render_chat(chat.ChatCompletionRequest.model_validate(body))
    ids = plain["prompt_token_ids"]
    request = chat.ChatCompletionRequest.model_validate(asked_with_ids(Api.CHAT, body, ids))
    assert request.kv_transfer_params["prompt_token_ids"] == ids
    _, (reused,) = await renderer.render_chat(request)

    assert shown(reused) == shown(plain)
    assert request.kv_transfer_params == PARAMS
    other = asked_with_ids(Api.CHAT, body, [7, 8])
    _, (taken,) = await renderer.render_chat(chat.ChatCompletionRequest.model_validate(other))
    assert taken["prompt_token_ids"] == [7, 8]


@pytest.mark.parametrize("body", TEXTS.values(), ids=TEXTS)
async def test_a_completions_ids_make_the_same_input(renderer, body):
    """Special tokens are part of the ids, and are not added again."""
    body = {"model": "m", **body}
    (plain,) = await renderer.render_completion(completion.CompletionRequest.model_validate(body))
    asked = asked_with_ids(Api.COMPLETIONS, body, plain["prompt_token_ids"])
    (reused,) = await renderer.render_completion(completion.CompletionRequest.model_validate(asked))

    assert shown(reused) == shown(plain)


async def test_ids_never_stand_for_an_image_where_chats_are_passed_by_ids():
    """That is why a decode engine's version must be known: before 0.32 they do."""
    body = {"model": "m", "messages": [{"role": "user", "content": IMAGE}]}
    request = chat.ChatCompletionRequest.model_validate(asked_with_ids(Api.CHAT, body, [1, 2]))

    assert (request.kv_transfer_params == PARAMS) is takes_chat_ids(vllm_version)


@pytest.mark.skipif(not takes_chat_ids(vllm_version), reason="this vLLM does not look at a chat's ids, and gets none")
async def test_ids_that_the_model_does_not_know_are_refused(renderer):
    """An engine with another tokenizer says so, rather than making something of them."""
    asked = asked_with_ids(Api.CHAT, {"model": "m", "messages": HELLO}, [10**6])
    with pytest.raises(VLLMValidationError, match="out of vocabulary"):
        await renderer.render_chat(chat.ChatCompletionRequest.model_validate(asked))


async def test_only_an_answer_with_the_prompts_text_differs(renderer):
    """With ids there is none: such a chat is not asked for by ids."""
    body = {"model": "m", "messages": HELLO, "return_prompt_text": True}
    _, (plain,) = await renderer.render_chat(chat.ChatCompletionRequest.model_validate(body))
    asked = asked_with_ids(Api.CHAT, body, plain["prompt_token_ids"])
    _, (reused,) = await renderer.render_chat(chat.ChatCompletionRequest.model_validate(asked))

    assert plain["prompt"]
    assert "prompt" not in reused
    assert not may_pass_ids(Api.CHAT, parse(json.dumps(body).encode()))


@pytest.mark.parametrize("name", ["chat_completion_stream_generator", "chat_completion_full_generator"])
def test_the_rendered_conversation_is_read_for_an_echo_alone(name):
    """With ids there is none; a request with echo has one engine."""
    # From 0.33 on the generator of a stream wraps another one, which makes its chunks.
    reader = getattr(OpenAIServingChat, f"{name}_raw", getattr(OpenAIServingChat, name))
    tree = ast.parse(textwrap.dedent(inspect.getsource(reader)))
    echoes = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "request.echo" in ast.unparse(node.test)]
    inside = {id(node) for echo in echoes for node in ast.walk(echo)}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "conversation"]

    assert reads
    assert all(id(node) in inside for node in reads)


def test_answers_are_written_as_they_are_read():
    """The ids are found by their name and their brackets."""
    ids = [1, 2, 3]
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    head = {"id": "x", "created": 7, "model": "m", "usage": usage, "kv_transfer_params": PARAMS}
    message = {"role": "assistant", "content": '"prompt_token_ids":[9]'}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    whole = chat.ChatCompletionResponse(**head, choices=choices, prompt_token_ids=ids)
    texts = [{"index": 0, "text": '"prompt_token_ids":[9]', "finish_reason": "length", "prompt_token_ids": ids}]
    for answer in (whole, completion.CompletionResponse(**head, choices=texts)):
        written = json.dumps(answer.model_dump(), ensure_ascii=False, separators=(",", ":"))  # as Starlette does
        read = read_with_ids(written.encode(), PromptIdsAnswer)
        assert bytes(ids_in(read)) == b"[1,2,3]"
        assert json.loads(bytes(read.kv_transfer_params)) == PARAMS
    assert ids_in(PromptIdsAnswer()) is NULL
    assert encode({"a": ids_in(read)}) == b'{"a":[1,2,3]}'
