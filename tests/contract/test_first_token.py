"""The first token of a prefill engine is written as vLLM would have streamed it: byte for byte, from its own models."""

import json
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.features.first_token.core.first_token import first_token
from pdrelay_proxy.features.first_token.schemas import FirstTokenOffer

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
OFFER = FirstTokenOffer(("completions", "chat"), 4096)
HEAD = {"id": "x", "created": 7, "model": "m"}
TEXTS = pytest.mark.parametrize("text", [" Käse", '"\\/\b\f\n\r\t', "\u2028 \U0001f600"])
STOPS = pytest.mark.parametrize("stop", [None, 5], ids=["by length or an EOS", "by a stop token"])


def usage():
    return UsageInfo(prompt_tokens=3, completion_tokens=1, total_tokens=4)


def shown(api, answer, **options):
    body = {"prompt": "hi", "messages": [], "stream": True, "max_tokens": 4} | options
    fields = parse(json.dumps(body).encode())
    written = json.dumps(answer.model_dump(), ensure_ascii=False, separators=(",", ":"))  # as Starlette's JSONResponse
    return first_token(api, fields, OFFER, maybe(written.encode(), TokensAnswer), 3).events().decode()


def events(*chunks):
    """As ``completion_stream_generator`` and ``chat_completion_stream_generator`` write them (0.32)."""
    return "".join(f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n" for chunk in chunks)


def end(counted):
    return f"data: {counted.model_dump_json(exclude_unset=False, exclude_none=True)}\n\ndata: [DONE]\n\n"


@TEXTS
@STOPS
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_completion_begins_as_vllms_own(text, stop, finish):
    """And ends so, if it ends with its first token."""
    answer = completion.CompletionResponse(
        **HEAD,
        choices=[
            completion.CompletionResponseChoice(
                index=0, text=text, finish_reason=finish, stop_reason=stop, prompt_token_ids=[1, 2, 3], token_ids=[9]
            )
        ],
        usage=usage(),
    )
    choice = completion.CompletionResponseStreamChoice(
        index=0, text=text, logprobs=None, finish_reason=finish if finish == "stop" else None, stop_reason=stop,
        prompt_token_ids=None, token_ids=None,
    )  # fmt: skip
    begun = events(completion.CompletionStreamResponse(**HEAD, object="text_completion", choices=[choice]))
    counted = completion.CompletionStreamResponse(**HEAD, choices=[], usage=usage())
    counting = {"stream_options": {"include_usage": True}}

    if finish == "length":
        assert shown(Api.COMPLETIONS, answer, **counting) == begun
    else:
        assert shown(Api.COMPLETIONS, answer) == begun + "data: [DONE]\n\n"
        assert shown(Api.COMPLETIONS, answer, **counting) == begun + end(counted)


@TEXTS
@STOPS
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_chat_begins_as_vllms_own(text, stop, finish):
    """With the role first."""
    answer = chat.ChatCompletionResponse(
        **HEAD,
        choices=[
            chat.ChatCompletionResponseChoice(
                index=0,
                message=chat.ChatMessage(role="assistant", content=text),
                finish_reason=finish,
                stop_reason=stop,
                token_ids=[9],
            )
        ],
        usage=usage(),
        prompt_token_ids=[1, 2, 3],
    )
    head = {**HEAD, "object": "chat.completion.chunk"}
    begun = chat.ChatCompletionResponseStreamChoice(
        index=0, delta=chat.DeltaMessage(role="assistant", content=""), logprobs=None, finish_reason=None
    )
    ends = {"stop_reason": stop} if finish == "stop" else {}
    said = chat.ChatCompletionResponseStreamChoice(
        index=0, delta=chat.DeltaMessage(content=text), logprobs=None,
        finish_reason=finish if finish == "stop" else None, token_ids=None, **ends,
    )  # fmt: skip
    role = chat.ChatCompletionStreamResponse(**head, choices=[begun], prompt_token_ids=None, prompt_text=None)
    both = events(role, chat.ChatCompletionStreamResponse(**head, choices=[said]))
    counted = chat.ChatCompletionStreamResponse(**head, choices=[], usage=usage())
    counting = {"stream_options": {"include_usage": True}}

    if finish == "length":
        assert shown(Api.CHAT, answer, **counting) == both
    else:
        assert shown(Api.CHAT, answer) == both + "data: [DONE]\n\n"
        assert shown(Api.CHAT, answer, **counting) == both + end(counted)
