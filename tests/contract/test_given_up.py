"""How vLLM ends the streams of requests that its engine aborts: with status 200, and as the router takes them for."""

import asyncio
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason

from pdrelay_proxy.core.protocol.sse import WholeLines
from pdrelay_proxy.errors import EngineError

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
ABORT = FINISH_REASON_STRINGS[FinishReason.ABORT]
USAGE = {"include_usage": True}


def bare(kind):
    """A serving class of vLLM without an engine and without options."""

    class Bare(kind):
        response_role = "assistant"

        def __init__(self):
            pass

        def __getattr__(self, name):
            return None

    return Bare()


async def outputs(*ends):
    """What an engine tells of a request: a token in each step, or that it is aborted."""
    for end in ends:
        ids = [] if end == ABORT else [5]
        one = CompletionOutput(0, " a" * len(ids), ids, None, None, finish_reason=end)
        yield RequestOutput("x", "hi", [1, 2], None, [one], finished=end is not None)


async def completion(ends, options):
    request = CompletionRequest(model="m", prompt="hi", stream=True, stream_options=options)

    async def numbered():
        async for one in outputs(*ends):
            yield 0, one

    serving = bare(OpenAIServingCompletion)
    metadata = SimpleNamespace()
    made = serving.completion_stream_generator(request, [], numbered(), "x", 7, "m", 1, None, metadata)
    return [event.encode() async for event in made]


async def chat(ends, options):
    said = [{"role": "user", "content": "hi"}]
    request = ChatCompletionRequest(model="m", messages=said, stream=True, stream_options=options)
    serving = bare(OpenAIServingChat)
    metadata = SimpleNamespace()
    made = serving.chat_completion_stream_generator(request, outputs(*ends), "x", "m", [], None, metadata)
    return [event.encode() async for event in made]


@pytest.mark.parametrize("options", [None, USAGE, USAGE | {"continuous_usage_stats": True}], ids=repr)
@pytest.mark.parametrize("api", [completion, chat])
@pytest.mark.parametrize("ends", [(ABORT,), (None, ABORT), (None, "length"), ("stop",)], ids=str)
def test_an_aborted_stream_ends_like_a_whole_one(api, ends, options):
    """But for its finish reason, if it has one: the router does not let that end pass."""
    lines = WholeLines("d0")
    events = asyncio.run(api(ends, options))
    assert events[-1] == b"data: [DONE]\n\n"

    if ends[-1] != ABORT:
        assert b"".join(map(lines.feed, events)) == b"".join(events)
    elif len(events) > 1:  # a leg does not take an end for a beginning
        for event in events[:-1]:
            assert lines.feed(event)
        with pytest.raises(EngineError, match="gave up"):
            lines.feed(events[-1])
