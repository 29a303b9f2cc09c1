"""The blocks by which prompts are compared, each named by all the text before its end.

A block ends where a message ends, so that the next turn of a chat shares all blocks of the last
one; longer messages are cut. Later pieces are longer, so a long conversation has few more blocks
than a short one. Engines' own blocks are of tokens, which the router does not have: a match here is
an estimate, and correctness never depends on it.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

BLOCK: Final = 512  # most bytes of a piece in the first 32 KiB
_SHARE: Final = 64  # behind them: this fraction of the text before the piece
# of a prompt; text behind these blocks or bytes is not compared
BLOCKS_MOST: Final = 4096
BYTES_MOST: Final = 1 << 20  # 1.3 ms
# Fields that shape the tokens before a prompt, or keep it out of the cache of others.
_CONTEXT: Final = (
    *("model", "cache_salt", "tools", "system", "instructions", "documents"),
    *("chat_template", "chat_template_kwargs", "reasoning_effort", "add_special_tokens"),
)
_CONTEXT_NAMES: Final = frozenset(_CONTEXT)
_ENDS: Final = b' \t\r\n"]'  # of an array, or of a text
_STYLE: Final = 64  # first bytes, which show whether spaces follow colons
# Inside a string a backslash precedes every quote, so these are between messages, or end a string.
_SPACED: Final = b'}, {"'
_COMPACT: Final = b'},{"'
# Roles and types of messages; inside a string their quotes would have backslashes.
_GENERATED: Final = (b'"assistant"', b'"function_call"', b'"reasoning"')
# Fields of media in a message; inside a string their quotes would have backslashes.
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
    """Return whether messages (JSON) may have an image or the like.

    A list in a tool call may look so.
    """
    if messages.find(b"[", 1) < 0:
        return False
    # without lists all contents are plain strings
    has_lists = messages.find(b'":[') >= 0 or messages.find(b'": [') >= 0
    return has_lists and any(messages.find(name) >= 0 for name in _MEDIA)


class PromptBlocks:
    """The blocks of one prompt. It is never changed."""

    __slots__ = ("_text", "ends", "names", "size")

    def __init__(self, prompt: bytes | memoryview, context: Mapping[str, msgspec.Raw]) -> None:
        """``prompt``: as it came; ``context``: the fields of its request."""
        text = self._text = bytes(prompt[:BYTES_MOST]).rstrip(_ENDS)
        # without the end of the array
        self.size = len(text) if len(prompt) <= BYTES_MOST else len(prompt)
        # of the blocks, in bytes; the last one is the size, unless the prompt is too long
        self.ends = _ends(text)
        self.names = _names(text, self.ends, context)

    @property
    def is_compared(self) -> bool:
        """Whether the blocks are the whole prompt."""
        return bool(self.ends) and self.ends[-1] == self.size

    @property
    def has_media(self) -> bool:
        """Whether a message may have an image or the like, or part of the prompt is not
        compared.
        """
        text = self._text
        return text[:1] == b"[" and (not self.is_compared or may_have_media(text))

    def generated(self, block: int) -> int:
        """Return how many bytes of messages written by an engine follow a block (0: the first)."""
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
        separator_at = text.find(separator, start) if is_array else -1
        end = size if separator_at < 0 else separator_at + 1
        while len(ends) < BLOCKS_MOST:
            longest = start // _SHARE if start > BLOCK * _SHARE else BLOCK
            if longest >= end - start:
                break
            start += longest
            ends.append(start)
        if len(ends) < BLOCKS_MOST:
            ends.append(end)
        start = end
    return ends


def _names(text: bytes, ends: list[int], context: Mapping[str, msgspec.Raw]) -> list[int]:
    present: Collection[str] = _CONTEXT_NAMES.intersection(context)  # usually the model alone
    if len(present) > 1:
        present = [field for field in _CONTEXT if field in context]
    name = hash(tuple([bytes(context[field]) for field in present]))
    names: list[int] = []
    start = 0
    for end in ends:
        name = hash((name, text[start:end]))
        names.append(name)
        start = end
    return names
