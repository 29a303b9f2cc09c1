"""How many tokens of prompt an engine has counted, in the words of each API."""

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.usage import cache_usage, prompt_tokens, prompt_tokens_in, with_cache_usage_in

SAYS_SEVEN = [
    b'{"usage":{"prompt_tokens":7,"completion_tokens":1}}',
    b'{"usage":{"input_tokens":7,"output_tokens":1}}',
    b'{"usage":{"input_tokens":4,"cache_read_input_tokens":2,"cache_creation_input_tokens":1}}',
    b'{"type":"response.completed","response":{"id":"r","usage":{"input_tokens":7}}}',
    b'{"type":"message_start","message":{"id":"m","usage":{"input_tokens":5,"cache_read_input_tokens":2}}}',
]
SAYS_NOTHING = [b"{}", b"[]", b"no json", b'{"usage":null}', b'{"usage":{}}', b'{"usage":{"prompt_tokens":"7"}}', b""]
SAYS_NOTHING += [b'{"message":{"usage":{"input_tokens":0}}}', b'{"message":"text"}', b'{"message":{"usage":null}}']


@pytest.mark.parametrize("answer", SAYS_SEVEN)
def test_an_answer_says_how_long_its_prompt_was(answer):
    """What was cached is part of the prompt, though Anthropic's words leave it out."""
    assert prompt_tokens(answer) == 7
    assert prompt_tokens_in(b': ping\n\nevent: x\ndata: {"a":1}\n\ndata: ' + answer + b"\n\ndata: [DONE]\n\n") == 7


@pytest.mark.parametrize("answer", SAYS_NOTHING)
def test_an_answer_may_say_nothing(answer):
    """Then nothing is compared."""
    assert prompt_tokens(answer) is None
    assert prompt_tokens_in(b"data: " + answer + b"\n\n") is None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("begin", [b"data: ", b"data:"])
def test_events_say_another_engines_word_of_its_cache(begin, end):
    """Lines without a usage stay as they came, byte for byte, also where a text looks like one."""
    details = b'"prompt_tokens_details":{"cached_tokens":%d}'
    said = cache_usage(Api.CHAT, b'{"usage":{"prompt_tokens":7,' + details % 3 + b"}}")
    text = b': ping%bdata: {"a": 1.0, "text":"\\"usage\\":{"}%b' % (end, end)
    usage = b'{"id":"x","usage":{"prompt_tokens":7,%b}}'

    assert with_cache_usage_in(text, said) is text
    assert with_cache_usage_in(text + begin + usage % (details % 6) + end + b"data: [DONE]" + end, said) == (
        text + b"data: " + usage % (details % 3) + end + b"data: [DONE]" + end
    )


@pytest.mark.parametrize("usage", [b"null", b"{}", b'{"prompt_tokens":7}', b'{"prompt_tokens_details":null}', b"7"])
def test_an_engine_may_say_nothing_of_its_cache(usage):
    """It does not, by default."""
    assert cache_usage(Api.CHAT, b'{"usage":%b}' % usage) is None
