"""The token ids of a text or a chat, from a prefill engine's answer (``return_token_ids``, vLLM
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
    """Return whether an engine of this vLLM version accepts the ids of a chat's prompt only where
    that is exact.

    Versions before 0.32 also accept them in place of messages with images.
    """
    match = None if version is None else _VERSION.match(version)
    return match is not None and (int(match[1]), int(match[2])) >= _TAKES_CHAT_IDS


def may_pass_ids(api: Api, fields: Fields) -> bool:
    """Return whether an engine gives the same answer for the ids of a prompt as for its text or
    messages.

    As vLLM 0.32 does (tests/contract/test_prompt_ids.py), which itself recognizes messages with
    more than text. An id takes up to eight bytes, so a long text with a token per byte would exceed
    the limit of an answer.
    """
    if api is _CHAT:
        if "return_prompt_text" in fields and fields["return_prompt_text"] not in (NULL, FALSE):
            return False
        view = memoryview(fields["messages"]) if "messages" in fields else None
        return view is not None and len(view) <= LONGEST_PROMPT and not may_have_media(bytes(view))
    if api is not _COMPLETIONS or ("suffix" in fields and fields["suffix"] != NULL):
        return False
    prompt = fields.get("prompt")
    if prompt is None:
        return False
    view = memoryview(prompt)
    return view[0] == _QUOTE and len(view) <= LONGEST_PROMPT  # a list has ids already


def read_with_ids(answer: bytes, answer_type: type[_Answer]) -> _Answer | None:
    """Parse an answer that may have the ids of its prompt, without parsing each id.

    They are most of its bytes, and a JSON parser takes 100 instructions for a number. As vLLM
    writes an answer, their name occurs once, and they end with the first bracket behind it. The
    name with its quotes cannot be part of a string, where a backslash precedes each quote.
    """
    name_at = answer.find(_NAME)
    ids_begin = name_at + len(_NAME) + 1
    ids_end = answer.find(b"]", ids_begin) + 1
    if (
        name_at < 0
        or ids_end <= ids_begin
        or answer[ids_begin - 1 : ids_begin + 1] != b":["
        or answer.find(_NAME, ids_end) >= 0
    ):
        return maybe(answer, answer_type)
    parsed = maybe(answer[:ids_begin] + b"null" + answer[ids_end:], answer_type)
    if parsed is not None:
        # A missing field is NULL itself; a null in the JSON only equals it.
        if parsed.prompt_token_ids is not NULL:
            parsed.prompt_token_ids = msgspec.Raw(memoryview(answer)[ids_begin:ids_end])
            return parsed
        if len(parsed.choices) == 1 and parsed.choices[0].prompt_token_ids is not NULL:
            parsed.choices[0].prompt_token_ids = msgspec.Raw(memoryview(answer)[ids_begin:ids_end])
            return parsed
    return maybe(answer, answer_type)  # another field has this name


def ids_in(answer: TokensAnswer | PromptIdsAnswer) -> msgspec.Raw:
    """Return the JSON of the ids in an answer; NULL: it has none."""
    ids = answer.prompt_token_ids
    if ids == NULL and len(answer.choices) == 1:
        ids = answer.choices[0].prompt_token_ids
    view = memoryview(ids)
    # Lists of lists would be several prompts.
    return ids if len(view) > len(b"[]") and view[0] == _BRACKET and view[1] in _DIGITS else NULL
