"""Estimates a prompt's tokens before an engine has counted them: a quarter of its bytes, except for
media.

Images, audio and embeddings come as base64, which make far fewer tokens than as much text. They are
recognized by the fields in which vLLM reads them (MM_PARSER_MAP in vllm/renderers/chat_utils.py),
never by their content, so a client cannot disguise text as media.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.fair_shares import BYTES_PER_TOKEN
from pdrelay_proxy.core.raw_json import Fields, maybe

MEDIUM_TOKENS: Final = 256  # of an image, a form's file or the like: a small image of most models
# bytes of a body too small to search for media
_SMALL: Final = MEDIUM_TOKENS * BYTES_PER_TOKEN
_COMMAS_MOST: Final = 32_768  # in a field that is parsed: bounds the items of its lists
_ITEMS_MOST: Final = 4096  # messages and parts of a request that are parsed; 1 us each
_LEVELS_MOST: Final = (
    8  # a batch of conversations, their messages, their parts, and parts within parts
)
_FIRST_ITEM_BYTES: Final = 64  # within which the first item must begin
_WHITESPACE: Final = b" \t\n\r"
_BRACKET: Final = 91
_BRACE: Final = 123
# Fields of requests with messages, or with objects that have parts as messages do.
_MESSAGES: Final = (
    "messages",
    "input",
    "inputs",
    "queries",
    "documents",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
)
_PARTS: Final = "content_parts"  # of /inference/v1/generate
# fields of requests whose whole value is a medium
_FIELDS: Final = ("prompt_embeds", "features", "images")
_LISTS: Final = (b'":[', b'": [')  # a value without any of them has no parts
# Fields of parts. vLLM reads no text from them, whatever the part's type.
_MEDIA: Final = (
    *(
        "image_url",
        "image_embeds",
        "image_pil",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
    ),
    *("video_embeds", "source", "data"),
)
_MEDIA_NAMES: Final = frozenset(_MEDIA)
_MARKS: Final = tuple([b'"%b"' % name.encode() for name in _MEDIA])
_LONG: Final = 1 << 20  # bytes; searching more for all marks takes longer than parsing its parts


def prompt_tokens(fields: Fields, size: int) -> int:
    """Return about how many tokens the prompts in a body of ``size`` bytes have."""
    if size <= _SMALL:
        return size // BYTES_PER_TOKEN
    request_media = _Media()
    request_media.media += [fields[name] for name in _FIELDS if name in fields]
    for name in _MESSAGES:
        if (value := fields.get(name)) is not None and _may_have_parts(value):
            request_media.add_from(value, are_parts=False)
    if (value := fields.get(_PARTS)) is not None and bytes(value).count(b",") <= _COMMAS_MOST:
        request_media.add_from(value, are_parts=True)
    text = size - sum([len(memoryview(medium)) for medium in request_media.media])
    return max(text, 0) // BYTES_PER_TOKEN + len(request_media.media) * MEDIUM_TOKENS


def _may_have_parts(value: msgspec.Raw) -> bool:
    text = bytes(value)
    if not _has_one(text, _LISTS) or text.count(b",") > _COMMAS_MOST:
        return False
    return len(text) > _LONG or _has_one(text, _MARKS)


def _has_one(text: bytes, marks: Sequence[bytes]) -> bool:
    for mark in marks:  # noqa: SIM110 (compiled, a generator takes longer)
        if text.find(mark) >= 0:
            return True
    return False


class _Media:
    """The media of one request, as far as it is parsed: the rest counts as text."""

    __slots__ = ("_left", "media")

    def __init__(self) -> None:
        self.media: list[msgspec.Raw] = []
        self._left = _ITEMS_MOST

    def add_from(self, value: msgspec.Raw, *, are_parts: bool, levels: int = _LEVELS_MOST) -> None:
        """Add the media among the parts in a value, or in the contents of its messages."""
        if levels == 0:
            return
        for item in _items(value):
            if self._left == 0:
                return
            self._left -= 1
            if memoryview(item)[0] == _BRACKET:
                self.add_from(item, are_parts=are_parts, levels=levels - 1)
            elif (fields := maybe(item, Fields)) is not None:
                if are_parts:
                    self.media += [fields[name] for name in _MEDIA_NAMES.intersection(fields)]
                if (content := fields.get("content")) is not None:
                    self.add_from(content, are_parts=True, levels=levels - 1)


def _items(value: msgspec.Raw) -> Sequence[msgspec.Raw]:
    """Return the items of a list of objects or lists, or the one object; else nothing."""
    view = memoryview(value)
    if view[0] == _BRACE:
        return [value]
    if view[0] != _BRACKET or bytes(view[1:_FIRST_ITEM_BYTES]).lstrip(_WHITESPACE)[:1] not in (
        b"{",
        b"[",
    ):
        return ()
    return maybe(value, list[msgspec.Raw]) or ()
