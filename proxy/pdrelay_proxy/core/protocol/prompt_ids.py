"""The token ids of a text or a chat, out of a prefill engine's answer (``return_token_ids``, vLLM
0.10.2 and later).

/v1/responses and /v1/messages of vLLM 0.32 have no such field, and prompts of ids need none.
"""

import re
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.prompt_blocks import may_have_media
from pdrelay_proxy.core.raw_json import FALSE, NULL, Fields, maybe
from pdrelay_proxy.core.schemas import PromptIdsAnswer, TokensAnswer

_Answer = TypeVar("_Answer", TokensAnswer, PromptIdsAnswer)
LONGEST_PROMPT: Final = 1 << 21  # bytes of JSON; ids of longer ones are not passed on
# looking a member up takes as long as a call
_CHAT = Api.CHAT
_COMPLETIONS = Api.COMPLETIONS
_NAME: Final = b'"prompt_token_ids"'
_DIGITS: Final = range(48, 58)
_BRACKET: Final = 91  # begins a list
_QUOTE: Final = 34  # begins a text
_VERSION: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
_TAKES_CHAT_IDS: Final = (0, 32)


@lru_cache(maxsize=64)
def takes_chat_ids(version: str | None) -> bool:
    """Tell whether an engine of a version of vLLM takes the ids of a chat's prompt, and only where
    that is exact.

    Those before 0.32 take them in place of messages with images, too.
    """
    found = None if version is None else _VERSION.match(version)
    return found is not None and (int(found[1]), int(found[2])) >= _TAKES_CHAT_IDS


def may_pass_ids(api: Api, fields: Fields) -> bool:
    """Tell whether an engine makes the same answer of the ids of a prompt as of its text, or its
    messages.

    As vLLM 0.32 does (tests/contract/test_prompt_ids.py): it knows by itself when messages are more
    than text. An id takes up to eight bytes, so those of a text of which each byte is a token would
    be more than an answer may be.
    """
    if api is _CHAT:
        if "return_prompt_text" in fields and fields["return_prompt_text"] not in (NULL, FALSE):
            return False
        written = memoryview(fields["messages"]) if "messages" in fields else None
        return (
            written is not None
            and len(written) <= LONGEST_PROMPT
            and not may_have_media(bytes(written))
        )
    if api is not _COMPLETIONS or ("suffix" in fields and fields["suffix"] != NULL):
        return False
    prompt = fields.get("prompt")
    if prompt is None:
        return False
    written = memoryview(prompt)
    return written[0] == _QUOTE and len(written) <= LONGEST_PROMPT  # a list has ids already


def read_with_ids(answer: bytes, wanted: type[_Answer]) -> _Answer | None:
    """Read an answer that may tell the ids of its prompt, without a look at each of them.

    They are most of its bytes, and a JSON parser takes 100 instructions for a number. As vLLM
    writes an answer, their name stands in it once, and they end with the first bracket behind it. A
    name with its quotes is no part of a text, where each quote has a backslash before it.
    """
    at = answer.find(_NAME)
    begin = at + len(_NAME) + 1
    end = answer.find(b"]", begin) + 1
    if (
        at < 0
        or end <= begin
        or answer[begin - 1 : begin + 1] != b":["
        or answer.find(_NAME, end) >= 0
    ):
        return maybe(answer, wanted)
    found = maybe(answer[:begin] + b"null" + answer[end:], wanted)
    if found is not None:
        # A field that is not there is NULL itself; a null that is there equals it.
        if found.prompt_token_ids is not NULL:
            found.prompt_token_ids = msgspec.Raw(memoryview(answer)[begin:end])
            return found
        if len(found.choices) == 1 and found.choices[0].prompt_token_ids is not NULL:
            found.choices[0].prompt_token_ids = msgspec.Raw(memoryview(answer)[begin:end])
            return found
    return maybe(answer, wanted)  # it is another field of this name


def found_ids(answer: TokensAnswer | PromptIdsAnswer) -> msgspec.Raw:
    """Return the JSON of the ids in an answer; NULL: it has none."""
    ids = answer.prompt_token_ids
    if ids == NULL and len(answer.choices) == 1:
        ids = answer.choices[0].prompt_token_ids
    written = memoryview(ids)
    # Lists of lists would be several prompts.
    return (
        ids
        if len(written) > len(b"[]") and written[0] == _BRACKET and written[1] in _DIGITS
        else NULL
    )
