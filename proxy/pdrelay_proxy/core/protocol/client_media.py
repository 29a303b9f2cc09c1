"""The media that a client may name: by a URL that an engine fetches, or by an id in engines'
caches.

Engines are inside the closed network, so fetching a client's URL is a request from inside
(server-side request forgery). vLLM reads URLs in the parts of messages (MM_PARSER_MAP in
vllm/renderers/chat_utils.py), in the sources of /v1/messages, in ``images`` of /v2/embed, in
``images``, ``audio`` and ``videos`` of /v1/systemone, and in ``content_parts`` of
/inference/v1/generate.

vLLM caches processed media for all clients under the ``uuid`` that a request gives them, and under
``mm_hashes`` of /inference/v1/generate: a client that knows the id of another client's image could
ask about that image, or have another image used in its place.
"""

import re
from collections.abc import Collection
from typing import Final

import msgspec

from pdrelay_proxy.core.raw_json import NULL, Fields, NotJson, decode, maybe
from pdrelay_proxy.errors import BadRequest

ANY_HOST: Final = "*"
# Without one of these a body has no URL. Names may be escaped, as in "image\\u005furl".
_MARKS: Final = (b'url"', b'uuid"', b"\\u00")
_CHAT: Final = "messages"
# Fields of requests that are messages, parts of messages, or objects with parts as messages have.
_MESSAGES: Final = frozenset(
    {
        *(_CHAT, "input", "inputs", "queries", "query", "documents", "items", "content_parts"),
        *("data_1", "data_2", "text_1", "text_2"),
    }
)
_LISTS: Final = ("images", "audio", "videos")  # fields of requests that are lists of URLs
# of a part: a string, or an object with url
_URLS: Final = frozenset({"image_url", "audio_url", "video_url", "file_url"})
# The types of parts and of sources whose ``url`` is fetched; in others, such as search results, it
# is text.
_FETCHED: Final = frozenset({"image_url", "audio_url", "video_url", "url"})
# where a message or a part has parts
_INSIDE: Final = ("content", "multi_modal", "output", "source")
# vLLM reads four: a batch of conversations, their messages, their parts, and parts within parts
_LEVELS_MOST: Final = 16
_ID: Final = "uuid"
_FEATURES: Final = "features"  # preprocessed media, with ids
_DATA: Final = "data:"
_LEAST: Final = len('{"uuid":0}')  # bytes of a part that names a medium
_BRACKET: Final = 91
_BRACE: Final = 123
# URLs that all parsers read alike: no user, no backslash, no space before the path.
_PLAIN: Final = re.compile(
    r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{0,5})?(?:[/?#][^\\\s]*)?", re.IGNORECASE
)
_SHOWN: Final = 80  # characters of a refused URL that the error quotes


def check_media(fields: Fields, hosts: Collection[str] | None, *, may_have_ids: bool) -> None:
    """Accept a request whose media are data: URLs, or on these hosts (in lower case; None: any).

    Raises:
        BadRequest: an engine would have to fetch one from another host, or one has an id that
            clients share.
    """
    rules = _MediaRules(hosts, may_have_ids=may_have_ids)
    for name in _MESSAGES.intersection(fields):
        value = fields[name]
        text = bytes(value)
        # The contents of most chats are plain strings; a search for one byte takes a tenth of the
        # time of a search for a mark.
        if (name != _CHAT or text.find(b"[", 1) > 0) and _has_mark(text):
            rules.check_parts(value, _LEVELS_MOST)
    for name in _LISTS:
        if (urls := fields.get(name)) is not None:
            rules.check_url(urls, name, _LEVELS_MOST)
    if not may_have_ids and fields.get(_FEATURES, NULL) != NULL:
        raise _shared_id(_FEATURES)


def _has_mark(text: bytes) -> bool:
    for mark in _MARKS:  # noqa: SIM110 (compiled, a generator takes longer)
        if text.find(mark) >= 0:
            return True
    return False


class _MediaRules:
    """The rules for the media of one request."""

    __slots__ = ("_hosts", "_may_have_ids")

    def __init__(self, hosts: Collection[str] | None, *, may_have_ids: bool) -> None:
        self._hosts = hosts
        self._may_have_ids = may_have_ids

    def check_parts(self, value: msgspec.Raw, levels: int) -> None:
        """Check the objects of a list, of lists in it, or the one object."""
        if levels == 0:
            raise BadRequest(f"a message is nested more than {_LEVELS_MOST} levels deep")
        first = memoryview(value)[0]
        if first == _BRACE:
            self._check_part(value, levels)
        elif first == _BRACKET:
            for item in _items(value):
                view = memoryview(item)
                if len(view) >= _LEAST and view[0] in (_BRACE, _BRACKET):
                    self.check_parts(item, levels - 1)

    def _check_part(self, value: msgspec.Raw, levels: int) -> None:
        fields = _fields(value)
        if not self._may_have_ids and fields.get(_ID, NULL) != NULL:
            raise _shared_id(_ID)
        for name in _URLS.intersection(fields):
            self.check_url(fields[name], name, levels)
        if (url := fields.get("url")) is not None:
            kind = maybe(fields.get("type", NULL), str)
            if kind is None or kind in _FETCHED:
                self.check_url(url, "url", levels)
        for name in _INSIDE:
            if (parts := fields.get(name)) is not None:
                self.check_parts(parts, levels - 1)

    def check_url(self, value: msgspec.Raw, name: str, levels: int) -> None:
        """Check a string, an object whose ``url`` is one, or a list of them."""
        first = memoryview(value)[0]
        if first == _BRACE:
            url = _fields(value).get("url")
            if url is not None and memoryview(url)[0] != _BRACE:
                self.check_url(url, name, levels)
        elif first == _BRACKET:
            for item in _items(value):
                if levels > 0:
                    self.check_url(item, name, levels - 1)
        elif bytes(memoryview(value)[: len(_DATA) + 1]) != b'"data:' and (
            text := maybe(value, str)
        ):
            self._check_text(text, name)

    def _check_text(self, url: str, name: str) -> None:
        hosts = self._hosts
        if hosts is None or url[: len(_DATA)].lower() == _DATA:
            return
        match = _PLAIN.fullmatch(url)
        if match is None:
            raise BadRequest(
                f"{url[:_SHOWN]!r} is not a URL that engines may fetch: send a data: URL"
                + (f", or one of {', '.join(sorted(hosts))}" if hosts else ""),
                param=name,
            )
        host = match[1].lower().strip("[]")
        if host not in hosts:
            raise BadRequest(
                f"engines may not fetch media from {host}: send them as a data: URL, or have the "
                f"operator of this "
                "router name the host in allowed_media_domains",
                param=name,
            )


def _fields(value: msgspec.Raw) -> Fields:
    """Parse an object; one that is nested too deeply may hide a URL, so it is refused."""
    try:
        return decode(value, Fields)
    except NotJson as exc:
        raise BadRequest(f"a part of a message cannot be read: {exc}") from exc


def _items(value: msgspec.Raw) -> list[msgspec.Raw]:
    """Parse a list, as ``_fields`` parses an object."""
    try:
        return decode(value, list[msgspec.Raw])
    except NotJson as exc:
        raise BadRequest(f"the parts of a message cannot be read: {exc}") from exc


def _shared_id(name: str) -> BadRequest:
    return BadRequest(
        f"{name} names media in a cache that all clients of the engines share, and this router has "
        f"several clients: "
        "leave it out (cache_salt_per_key)",
        param=name,
    )
