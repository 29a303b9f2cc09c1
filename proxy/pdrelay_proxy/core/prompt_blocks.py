"""The blocks that a prompt's JSON is compared by, each named by all that comes before its end.

A block ends where a message ends, so that the next turn of a chat finds all of the last one; what
is longer is cut. The later the place, the longer the pieces, so a long conversation has few more
blocks than a short one. Engines' own blocks are of tokens, which the router does not have: what is
found here is an estimate, and never decides what is right.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

BLOCK: Final = 512  # bytes of a piece, at most, in the first 32 KiB
_SHARE: Final = 64  # behind them: this part of what comes before it
# of a prompt; what comes behind them, or behind so many bytes, is not compared
BLOCKS_MOST: Final = 4096
BYTES_MOST: Final = 1 << 20  # 1.3 ms
# What shapes the tokens before a prompt, or keeps it out of the cache of others.
_CONTEXT: Final = (
    *("model", "cache_salt", "tools", "system", "instructions", "documents"),
    *("chat_template", "chat_template_kwargs", "reasoning_effort", "add_special_tokens"),
)
_CONTEXT_NAMES: Final = frozenset(_CONTEXT)
_ENDS: Final = b' \t\r\n"]'  # of an array, or of a text
_STYLE: Final = 64  # bytes from the beginning that show whether there are spaces behind colons
# In a text every quote has a backslash before it, so these are between messages, or the end of a
# text.
_SPACED: Final = b'}, {"'
_COMPACT: Final = b'},{"'
_NOTHING: Final = msgspec.Raw(b"")
# Values that say who wrote a message; in a text their quotes would have backslashes.
_GENERATED: Final = (b'"assistant"', b'"function_call"', b'"reasoning"')
# Names of images and the like in a message; in a text the quotes would have backslashes before
# them.
_MEDIA: Final = tuple(
    b'"%b"' % name.encode()
    for name in (
        *(
            "image_url",
            "input_image",
            "image_embeds",
            "image_pil",
            "audio_url",
            "input_audio",
            "audio_embeds",
        ),
        *("video_url", "video_embeds", "prompt_embeds"),
    )
)  # MM_PARSER_MAP in vllm/renderers/chat_utils.py
_GIVEN: Final = (b'"user"', b'"tool"', b'"system"', b'"developer"', b'"function_call_output"')


def may_have_media(messages: bytes) -> bool:
    """Tell whether there may be an image or the like in messages (JSON).

    A list in a call of a tool may look so.
    """
    if messages.find(b"[", 1) < 0:
        return False
    # without them all are plain texts
    has_lists = messages.find(b'":[') >= 0 or messages.find(b'": [') >= 0
    return has_lists and any(messages.find(name) >= 0 for name in _MEDIA)


class PromptBlocks:
    """The blocks of one prompt. It does not change."""

    __slots__ = ("_text", "ends", "names", "size")

    def __init__(self, prompt: bytes | memoryview, context: Mapping[str, msgspec.Raw]) -> None:
        """``prompt``: as it came; ``context``: the fields of its request."""
        text = self._text = bytes(prompt[:BYTES_MOST]).rstrip(_ENDS)
        # without what closes the array
        self.size = len(text) if len(prompt) <= BYTES_MOST else len(prompt)
        # of the blocks, in bytes; the last one is the size, unless the prompt is too long
        self.ends = _ends(text)
        self.names = _names(text, self.ends, context)

    @property
    def is_compared(self) -> bool:
        """Tell whether the blocks are all of the prompt."""
        return bool(self.ends) and self.ends[-1] == self.size

    @property
    def has_media(self) -> bool:
        """Tell whether there may be an image or the like in a message, or there is more than is
        compared.
        """
        text = self._text
        return text[:1] == b"[" and (not self.is_compared or may_have_media(text))

    def generated(self, block: int) -> int:
        """Return how many bytes of messages that an engine has written follow a block (0: the first
        one).
        """
        ends = self.ends
        text = self._text
        start = end = ends[block]
        for later in ends[block + 1 :]:
            piece = text[end:later]
            if any(mark in piece for mark in _GIVEN) or (
                end == start and not any(mark in piece for mark in _GENERATED)
            ):
                break
            end = later
        return end - start


def _ends(text: bytes) -> list[int]:
    ends: list[int] = []
    separator = _SPACED if text.find(b'": ', 0, _STYLE) >= 0 else _COMPACT
    is_array = text[:1] == b"["
    start = 0
    size = len(text)
    while start < size and len(ends) < BLOCKS_MOST:
        found = text.find(separator, start) if is_array else -1
        end = size if found < 0 else found + 1
        while len(ends) < BLOCKS_MOST:
            most = start // _SHARE if start > BLOCK * _SHARE else BLOCK
            if most >= end - start:
                break
            start += most
            ends.append(start)
        if len(ends) < BLOCKS_MOST:
            ends.append(end)
        start = end
    return ends


def _names(text: bytes, ends: list[int], context: Mapping[str, msgspec.Raw]) -> list[int]:
    there: Collection[str] = _CONTEXT_NAMES.intersection(context)  # most often the model alone
    if len(there) > 1:
        there = [field for field in _CONTEXT if field in context]
    name = hash(tuple([bytes(context[field]) for field in there]))
    names: list[int] = []
    start = 0
    for end in ends:
        name = hash((name, text[start:end]))
        names.append(name)
        start = end
    return names
