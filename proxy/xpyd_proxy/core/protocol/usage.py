"""How many tokens of prompt an engine has counted: both legs of a request must say the same.

If they do not, the engines have made different prompts out of one request (another template, another tokenizer, another
version of the model's files), and the decode engine has read a KV cache that does not belong to its prompt.
"""

from typing import Final

import msgspec

from xpyd_proxy.core.raw_json import maybe
from xpyd_proxy.core.schemas import Usage, UsageAnswer

_DATA: Final = b"data:"
_RETURN: Final = 13  # ends a line, too
_MARK: Final = b'"usage":{'  # vLLM leaves the field out of the chunks that have none


def prompt_tokens(answer: bytes) -> int | None:
    """Return what an answer, or the data of one event, says about its prompt; None: nothing."""
    said = maybe(answer, UsageAnswer)
    usage = said and (said.usage or (said.response and said.response.usage))
    return prompt_of(usage) if usage else None


def counted(usage: msgspec.Raw) -> int | None:
    """Return what the ``usage`` of an answer says about its prompt; None: nothing."""
    found = maybe(usage, Usage)
    return prompt_of(found) if found else None


def prompt_tokens_in(events: bytes) -> int | None:
    """Return what whole lines of a stream say about the prompt; None: nothing."""
    at = events.find(_MARK)
    while at >= 0:
        start, end = events.rfind(b"\n", 0, at) + 1, events.find(b"\n", at)
        line = events[start : len(events) if end < 0 else end]
        for part in (line,) if _RETURN not in line else line.splitlines():
            if part.startswith(_DATA) and part.find(_MARK) >= 0:
                found = prompt_tokens(part[len(_DATA) :])
                if found is not None:
                    return found
        at = -1 if end < 0 else events.find(_MARK, end)
    return None


def prompt_of(usage: Usage) -> int | None:
    """Return the length of the whole prompt."""
    said = usage.prompt_tokens
    if said is not None or usage.input_tokens is None:
        return said
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
