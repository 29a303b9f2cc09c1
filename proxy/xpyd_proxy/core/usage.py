"""How many tokens of prompt an engine has counted: both legs of a request must say the same.

If they do not, the engines have made different prompts out of one request (another template, another tokenizer, another
version of the model's files), and the decode engine has read a KV cache that does not belong to its prompt.
"""

from typing import Final

import msgspec

from xpyd_proxy.core.raw_json import NotJson, decode

_MARK: Final = b'"usage":{'  # vLLM leaves the field out of the chunks that have none


class Comparison(msgspec.Struct):
    """What the two legs of a request say, each as soon as it says something."""

    prefill: int | None = None
    decode: int | None = None

    @property
    def differ(self) -> bool:
        """Tell whether both have said something, and not the same."""
        return None not in (self.prefill, self.decode) and self.prefill != self.decode


class _Usage(msgspec.Struct):
    """In the words of the four APIs; that of messages leaves out of its input what was cached."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def prompt(self) -> int | None:
        """The whole prompt."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Inner | None = None  # in the last event of /v1/responses


def prompt_tokens(answer: bytes) -> int | None:
    """Return what an answer, or the data of one event, says about its prompt; None: nothing."""
    try:
        said = decode(answer, _Answer)
    except NotJson:
        return None
    usage = said.usage or (said.response and said.response.usage)
    return usage.prompt if usage else None


def prompt_tokens_in(events: bytes) -> int | None:
    """Return what whole lines of a stream say about the prompt; None: nothing."""
    at = events.find(_MARK)
    if at < 0:
        return None
    for line in events[events.rfind(b"\n", 0, at) + 1 :].splitlines():
        if line.startswith(b"data:") and _MARK in line and (found := prompt_tokens(line[5:])) is not None:
            return found
    return None
