"""How many tokens of prompt an engine has counted, in the words of each API."""

import json

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
SAYS_NOTHING += [b'{"usage":{"prompt_tokens":%b}}' % number for number in (b"-1", b"1000000001", b"9" * 400)]
SAYS_NOTHING += [b'{"message":{"usage":{"input_tokens":0}}}', b'{"message":"text"}', b'{"message":{"usage":null}}']


def spaced(answer):
    """The same with the spaces that Python's json writes."""
    return json.dumps(json.loads(answer)).encode()


@pytest.mark.parametrize("answer", [*SAYS_SEVEN, *map(spaced, SAYS_SEVEN)])
def test_an_answer_says_how_long_its_prompt_was(answer):
    """What was cached is part of the prompt, though Anthropic's words leave it out."""
    assert prompt_tokens(answer) == 7
    assert prompt_tokens_in(b': ping\n\nevent: x\ndata: {"a":1}\n\ndata: ' + answer + b"\n\ndata: [DONE]\n\n") == 7


@pytest.mark.parametrize("answer", SAYS_NOTHING)
def test_an_answer_may_say_nothing(answer):
    """Then nothing is compared. A number beyond any prompt's would spoil every sum that it gets into."""
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
    assert cache_usage(Api.CHAT, b'{"usage": %b}' % usage) is None


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES])
def test_an_engine_or_what_stands_before_it_may_write_spaces(api):
    """As Python's json does; clients are billed by what the prefill engine has said."""
    own = {
        Api.RESPONSES: {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 3}},
        Api.MESSAGES: {"input_tokens": 4, "cache_read_input_tokens": 3},
    }.get(api, {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}})
    others = json.loads(json.dumps(own).replace("4", "1").replace("3", "6"))
    said = cache_usage(api, json.dumps({"usage": own}).encode())
    event = b"data: " + json.dumps({"id": "x", "usage": others}).encode() + b"\n\n"

    shown = with_cache_usage_in(event, said)

    assert json.loads(shown.removeprefix(b"data: "))["usage"].items() >= own.items()
