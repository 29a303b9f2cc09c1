"""A parser of vLLM keeps back what may begin a tool call, also where the client has no tools; the router reckons so."""

import warnings

import pytest
from transformers import AutoTokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.engine import registered_adapters
    from vllm.parser.engine.parser_engine import ParserEngine
    from vllm.parser.parser_manager import ParserManager

from pdrelay_proxy.core.protocol.replay import may_be_kept
from pdrelay_tools.local.model import ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SPECIAL = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]"),
]
TOLD = {  # by parser: the texts of tokens, and what the client gets of each
    "qwen3_coder": {"Hi": "Hi", " <": " ", "div": "<div", ">": ">", "\n\n<": "\n\n", "b>": "<b>", " a": " a"},
    "gemma4": {"Hi": "Hi", " music": " musi", " is": "c is", " logi": " logi", "c": "", "al": "", "!": "cal!"},
    "minimax_m3": {"Hi": "Hi", ' "': " ", "a": '"a', "[0]": "[0", " b": "] b", " c": " c"},
}


@pytest.fixture
def tokenizer(tmp_path):
    ensure_model(tmp_path / "tiny")
    found = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    found.add_tokens(SPECIAL, special_tokens=True)
    return found


@pytest.mark.parametrize("name", TOLD)
def test_what_is_kept_back_begins_the_next_text(tokenizer, name):
    """So the router sees that a token was shown whole: by a text behind it that begins otherwise."""
    kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    assert request.tool_choice == "none"

    expected = TOLD[name]
    if name == "minimax_m3" and not hasattr(registered_adapters, "MinimaxM3Parser"):
        expected = {text: text for text in expected}  # before 0.32 it is in Rust, and sees no chat without tools
    parser = kind(tokenizer, None)
    told = []
    for number, text in enumerate(expected):
        delta = parser.parse_delta(text, [10 + number], request, prompt_token_ids=[5, 6], finished=False)
        told.append("" if delta is None else delta.content or "")

    assert told == list(expected.values())
    if expected is not TOLD[name]:
        return
    texts = list(expected)
    cut_short = [number for number in range(len(texts) - 1) if not texts[number].endswith(told[number][-1:] or "?")]
    following = [next(text for text in told[number + 1 :] if text) for number in cut_short]
    assert following
    assert all(may_be_kept(text) for text in following)


def test_every_literal_of_every_parser_begins_so(tokenizer):
    """Else a chat would go on behind a token of which the client lacks the end."""
    parsers = {
        kind
        for kind in vars(registered_adapters).values()
        if isinstance(kind, type) and issubclass(kind, ParserEngine) and kind.__module__ != registered_adapters.__name__
    }
    literals = {
        literal for kind in parsers for literal in kind(tokenizer).parser_engine_config.terminal_literals if literal[1:]
    }
    assert len(parsers) > 10
    assert [literal for literal in literals if literal[0].isalnum()] == ["call:"]
    assert [literal for literal in literals if not may_be_kept(literal)] == []
