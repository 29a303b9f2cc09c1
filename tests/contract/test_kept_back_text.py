"""A parser of vLLM keeps back what may begin a tool call, also where the client has no tools; the router reckons so."""

import warnings

import pytest
from transformers import AutoTokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

from xpyd_proxy.core.protocol.first_token import MARKS
from xpyd_proxy.local.model import ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
TOKENS = ["Hi", " <", "div", ">", "\n\n<", "b>", " a"]


def test_what_is_kept_back_begins_the_next_text(tmp_path):
    """And begins with one of the router's marks: so it sees that a token was shown whole (core/protocol/replay.py)."""
    ensure_model(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"], special_tokens=True)
    kind = ParserManager.get_parser(tool_parser_name="qwen3_coder", enable_auto_tools=True)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    assert request.tool_choice == "none"

    parser, told = kind(tokenizer, None), []
    for number, text in enumerate(TOKENS):
        delta = parser.parse_delta(text, [10 + number], request, prompt_token_ids=[5, 6], finished=False)
        told.append(delta.content or "")

    assert told == ["Hi", " ", "<div", ">", "\n\n", "<b>", " a"]
    cut_short = [number for number, text in enumerate(TOKENS[:-1]) if not text.endswith(told[number][-1:])]
    assert [told[number + 1][0] in MARKS for number in cut_short] == [True, True]
