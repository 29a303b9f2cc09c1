"""About how many tokens a prompt has, before an engine has counted them: a quarter of its bytes,
but for media.

Images, audio and embeddings come as base64, of which engines make far fewer tokens than of as much
text. They are told by where vLLM reads them (MM_PARSER_MAP in vllm/renderers/chat_utils.py) and
never by what they look like, so a client cannot dress up text as one.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.fair_shares import BYTES_PER_TOKEN
from pdrelay_proxy.core.raw_json import Fields, maybe

MEDIUM_TOKENS: Final = 256  # of an image, a form's file or the like: a small image of most models
# bytes of a body, in which a medium is not worth looking for
_SMALL: Final = MEDIUM_TOKENS * BYTES_PER_TOKEN
_COMMAS_MOST: Final = 32_768  # of a field that is read: its lists have no more items
_ITEMS_MOST: Final = 4096  # messages and parts of a request that are looked at; 1 us each
_LEVELS_MOST: Final = 8  # a batch of messages, of which one has parts, of which one has parts
_LOOK: Final = 64  # bytes in which the first item must begin
_WHITESPACE: Final = b" \t\n\r"
_BRACKET: Final = 91
_BRACE: Final = 123
# Fields of requests with messages, or things that have parts as messages do.
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
# fields of requests that are media as a whole
_FIELDS: Final = ("prompt_embeds", "features", "images")
_LISTS: Final = (b'":[', b'": [')  # without them there are no parts
# Fields of parts. No text is read from them, whatever the type of the part is.
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
_LONG: Final = 1 << 20  # bytes; to look for all marks in more takes longer than to read its parts


def prompt_tokens(fields: Fields, size: int) -> int:
    """Return about how many tokens become of a body with these fields and so many bytes."""
    if size <= _SMALL:
        return size // BYTES_PER_TOKEN
    found = _Media()
    found.media += [fields[name] for name in _FIELDS if name in fields]
    for name in _MESSAGES:
        if (value := fields.get(name)) is not None and _may_have_parts(value):
            found.look_in(value, are_parts=False)
    if (value := fields.get(_PARTS)) is not None and bytes(value).count(b",") <= _COMMAS_MOST:
        found.look_in(value, are_parts=True)
    text = size - sum([len(memoryview(medium)) for medium in found.media])
    return max(text, 0) // BYTES_PER_TOKEN + len(found.media) * MEDIUM_TOKENS


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
    """The media of one request, as far as it is looked at: the rest is taken for text."""

    __slots__ = ("_left", "media")

    def __init__(self) -> None:
        self.media: list[msgspec.Raw] = []
        self._left = _ITEMS_MOST

    def look_in(self, value: msgspec.Raw, *, are_parts: bool, levels: int = _LEVELS_MOST) -> None:
        """Add those of the parts that a value is, or of the contents of its messages."""
        if levels == 0:
            return
        for item in _items(value):
            if self._left == 0:
                return
            self._left -= 1
            if memoryview(item)[0] == _BRACKET:
                self.look_in(item, are_parts=are_parts, levels=levels - 1)
            elif (fields := maybe(item, Fields)) is not None:
                if are_parts:
                    self.media += [fields[name] for name in _MEDIA_NAMES.intersection(fields)]
                if (content := fields.get("content")) is not None:
                    self.look_in(content, are_parts=True, levels=levels - 1)


def _items(value: msgspec.Raw) -> Sequence[msgspec.Raw]:
    """Return the items of a list of objects or lists, or the one object; of texts and numbers,
    nothing.
    """
    view = memoryview(value)
    if view[0] == _BRACE:
        return [value]
    if view[0] != _BRACKET or bytes(view[1:_LOOK]).lstrip(_WHITESPACE)[:1] not in (b"{", b"["):
        return ()
    return maybe(value, list[msgspec.Raw]) or ()
