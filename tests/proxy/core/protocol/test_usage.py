"""How many tokens of prompt an engine has counted, in the words of each API."""

import pytest

from xpyd_proxy.core.protocol.usage import prompt_tokens, prompt_tokens_in

SAYS_SEVEN = [
    b'{"usage":{"prompt_tokens":7,"completion_tokens":1}}',
    b'{"usage":{"input_tokens":7,"output_tokens":1}}',
    b'{"usage":{"input_tokens":4,"cache_read_input_tokens":2,"cache_creation_input_tokens":1}}',
    b'{"type":"response.completed","response":{"id":"r","usage":{"input_tokens":7}}}',
]
SAYS_NOTHING = [b"{}", b"[]", b"no json", b'{"usage":null}', b'{"usage":{}}', b'{"usage":{"prompt_tokens":"7"}}', b""]


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
