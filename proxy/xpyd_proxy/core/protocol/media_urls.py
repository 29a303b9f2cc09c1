"""Which images, audio and videos an engine may fetch for a client that names them by URL.

Engines are inside the closed network, so a URL of a client is a request from there (server-side request forgery).
URLs stand where vLLM reads them: in the parts of messages (MM_PARSER_MAP in vllm/renderers/chat_utils.py), in the
sources of /v1/messages, in ``images`` of /v2/embed and in ``content_parts`` of /inference/v1/generate.
"""

import re
from collections.abc import Collection
from typing import Final

import msgspec

from xpyd_proxy.core.raw_json import NULL, Fields, maybe
from xpyd_proxy.errors import BadRequest

ANY_HOST: Final = "*"
# Without one of these there is no URL to look for. Names may be escaped, as "image\u005furl" is.
_MARKS: Final = (b'url"', b"\\u00")
_CHAT: Final = "messages"
# Fields of requests that are messages, parts of messages, or things that have parts as messages do.
_MESSAGES: Final = frozenset(
    {
        *(_CHAT, "input", "inputs", "queries", "query", "documents", "items", "content_parts"),
        *("data_1", "data_2", "text_1", "text_2"),
    }
)
_IMAGES: Final = "images"  # a list of URLs
_URLS: Final = frozenset(
    {"image_url", "audio_url", "video_url", "file_url"}
)  # of a part: a text, or an object with url
# The types of parts and of sources whose ``url`` is fetched; in others, as a result of a search, it is text.
_FETCHED: Final = frozenset({"image_url", "audio_url", "video_url", "url"})
_INSIDE: Final = ("content", "multi_modal", "output", "source")  # where a message or a part has parts
_LEVELS_MOST: Final = 16  # vLLM reads four: a batch of messages, of which one has parts, of which one has parts
_DATA: Final = "data:"
_BRACKET: Final = 91
_BRACE: Final = 123
# What all readers of URLs understand alike: no user, no backslash, no space before the path.
_PLAIN: Final = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{0,5})?(?:[/?#][^\\\s]*)?", re.IGNORECASE)
_SHOWN: Final = 80  # characters of a URL that is not plain, in the answer


def check_media_urls(fields: Fields, hosts: Collection[str]) -> None:
    """Accept a request whose media come with it, or from these hosts (in lower case).

    Raises:
        BadRequest: an engine would have to fetch one from another place.
    """
    for name in _MESSAGES.intersection(fields):
        value = fields[name]
        text = bytes(value)
        # The contents of most chats are plain texts; to find a byte takes a tenth of the time that a mark takes.
        if (name != _CHAT or text.find(b"[", 1) > 0) and (text.find(_MARKS[0]) >= 0 or text.find(_MARKS[1]) >= 0):
            _check_parts(value, hosts, _LEVELS_MOST)
    if (images := fields.get(_IMAGES)) is not None:
        _check_url(images, hosts, _IMAGES, _LEVELS_MOST)


def _check_parts(value: msgspec.Raw, hosts: Collection[str], levels: int) -> None:
    """Check the objects of a list, of lists in it, or the one object."""
    if levels == 0:
        raise BadRequest(f"a message is nested more than {_LEVELS_MOST} levels deep")
    first = memoryview(value)[0]
    if first == _BRACE:
        _check_part(value, hosts, levels)
    elif first == _BRACKET:
        for item in maybe(value, list[msgspec.Raw]) or ():
            if memoryview(item)[0] in (_BRACE, _BRACKET):
                _check_parts(item, hosts, levels - 1)


def _check_part(value: msgspec.Raw, hosts: Collection[str], levels: int) -> None:
    fields = maybe(value, Fields)
    if fields is None:
        return
    for name in _URLS.intersection(fields):
        _check_url(fields[name], hosts, name, levels)
    if (url := fields.get("url")) is not None:
        kind = maybe(fields.get("type", NULL), str)
        if kind is None or kind in _FETCHED:
            _check_url(url, hosts, "url", levels)
    for name in _INSIDE:
        if (inner := fields.get(name)) is not None:
            _check_parts(inner, hosts, levels - 1)


def _check_url(value: msgspec.Raw, hosts: Collection[str], name: str, levels: int) -> None:
    """Check a text, an object whose ``url`` is one, or a list of them."""
    first = memoryview(value)[0]
    if first == _BRACE:
        url = (maybe(value, Fields) or {}).get("url")
        if url is not None and memoryview(url)[0] != _BRACE:
            _check_url(url, hosts, name, levels)
    elif first == _BRACKET:
        for item in maybe(value, list[msgspec.Raw]) or ():
            if levels > 0:
                _check_url(item, hosts, name, levels - 1)
    elif bytes(memoryview(value)[: len(_DATA) + 1]) != b'"data:' and (text := maybe(value, str)):
        _check_text(text, hosts, name)


def _check_text(url: str, hosts: Collection[str], name: str) -> None:
    if url[: len(_DATA)].lower() == _DATA:
        return
    plain = _PLAIN.fullmatch(url)
    if plain is None:
        raise BadRequest(
            f"{url[:_SHOWN]!r} is not a URL that engines may fetch: send a data: URL"
            + (f", or one of {', '.join(sorted(hosts))}" if hosts else ""),
            param=name,
        )
    host = plain[1].lower().strip("[]")
    if host not in hosts:
        raise BadRequest(
            f"engines may not fetch media from {host}: send them as a data: URL, or have the operator of this router "
            "name the host in allowed_media_domains",
            param=name,
        )
