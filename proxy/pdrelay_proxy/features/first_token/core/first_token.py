"""The prefill engine's token, shown to the client when that engine answers; the decode engine goes
on behind it.

A continuation is exact under the rules of core/protocol/replay.py. Beyond them the token must be
what one engine would have streamed first. So prefill engines say in their answers for which APIs it
may be shown, and how long a prompt and its answer may be; until they have, and wherever something
is odd, the decode engine makes the token again.

The decode engine's stream passes as bytes: only its first event, and those with a usage, are
parsed.
"""

import re
from typing import Final

import msgspec
from msgspec import UNSET

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.continuation import (
    Continuation,
    Rest,
    least,
    limits,
    limits_behind,
    prompt_of,
    usage_of_one_engine,
    with_model_of,
)
from pdrelay_proxy.core.protocol.replay import behind
from pdrelay_proxy.core.protocol.request_bodies import with_ids
from pdrelay_proxy.core.protocol.stream_opening import Opening
from pdrelay_proxy.core.raw_json import (
    FALSE,
    NULL,
    TRUE,
    Fields,
    NotJson,
    decode_whole_floats,
    encode,
    maybe,
    to_raw,
)
from pdrelay_proxy.core.schemas import TokensAnswer, TokensChoice
from pdrelay_proxy.features.first_token.schemas import FirstTokenOffer, RoleEvent

_COMPLETIONS: Final = Api.COMPLETIONS
_CHAT: Final = Api.CHAT
_NAMES: Final = {_COMPLETIONS: "completions", _CHAT: "chat"}  # in an engine's offer
_CHUNKS: Final = {_COMPLETIONS: to_raw("text_completion"), _CHAT: to_raw("chat.completion.chunk")}
_ASSISTANT: Final = to_raw("assistant")
_NO_TEXT: Final = to_raw("")
_HALF: Final = "\N{REPLACEMENT CHARACTER}"  # the token is a part of a character
# they begin tool calls and the like, which a parser must see from their beginning on
_MARKS: Final = frozenset("<[{|")
_TEXT: Final = ("role", "content")  # what a message has that is a text
_EMPTY: Final = (NULL, msgspec.Raw(b"[]"), msgspec.Raw(b"{}"))
_NO_PROMPT: Final = b',"prompt_token_ids":null,"prompt_text":null'  # in the first event of a chat
_ZERO: Final = msgspec.Raw(b"0")
_ONE: Final = msgspec.Raw(b"1")
_DATA: Final = b"data:"
_DONE: Final = b"data: [DONE]\n\n"
# How vLLM begins each event of a stream: with a name of the answer and a time that are the same in
# all of them.
_BEGINNING: Final = re.compile(rb'data: \{("id":"[^"\\]*",)"object":"[a-z._]+",("created":[0-9]+,)')
_IN_ALL: Final = ("id", "created")
_ROLE: Final = b'"role"'
_BACKSLASH: Final = 92
_USAGE: Final = b'"usage":{'  # vLLM leaves the field out, or writes null, where there is none


def may_show(api: Api, fields: Fields, offer: FirstTokenOffer) -> bool:
    """Tell whether a prefill engine may be asked for the first token of a request that can be
    resumed.
    """
    if _NAMES.get(api) not in offer.apis:
        return False
    if "skip_special_tokens" in fields and fields["skip_special_tokens"] == FALSE:
        return False
    if "stream_options" in fields:
        options = maybe(fields["stream_options"], Fields) or {}
        if options.get("continuous_usage_stats", FALSE) == TRUE:
            return False
    wanted = least(fields)
    # Of a limit below that the decode engine refuses the request.
    return wanted <= 0 or wanted <= min(limits(api, fields).values(), default=wanted)


def asked_for_token(fields: Fields) -> Fields:
    """Return what a prefill engine is asked beside its usual leg: its token must be the model's
    own.

    It may be an end, unless the client rules that out; a token that cannot be the end is no answer.
    """
    return {"return_token_ids": TRUE, "min_tokens": _ONE if least(fields) > 0 else _ZERO}


def offered(offer: msgspec.Raw) -> FirstTokenOffer | None:
    """Return what a prefill engine says of its tokens; None: they are not to be shown."""
    if offer is NULL:  # an error of msgspec's takes as long as a small object
        return None
    try:
        return decode_whole_floats(offer, FirstTokenOffer)
    except NotJson:
        return None


class FirstToken(Opening):
    """The first token of an answer, which may be all of it. It does not change."""

    __slots__ = (
        "_answer",
        "_begin",
        "_choice",
        "_text",
        "api",
        "fields",
        "head",
        "prompt",
        "token",
    )

    def __init__(  # noqa: PLR0917 (by name they cost several hundred instructions more)
        self,
        api: Api,
        fields: Fields,
        answer: TokensAnswer,
        token: int,
        text: str,
        prompt: msgspec.Raw,
    ) -> None:
        (choice,) = answer.choices
        Opening.__init__(self, 1, choice.finish_reason == "stop")
        self.api = api
        self.fields = fields  # the client's
        self._answer = answer
        self._choice = choice
        self._text = text
        self.head: Fields = {
            "id": answer.id,
            "object": _CHUNKS[api],
            "created": answer.created,
            "model": answer.model,
        }
        self._begin = b"data: " + encode(self.head)[:-1] + b',"choices":['  # of each event
        self.prompt = prompt  # its tokens
        self.token = token

    def events(self) -> bytes:
        """Return the beginning of the client's stream, or all of it, as vLLM would have sent it."""
        shown = b""
        if self.api is _CHAT:
            message = self._choice.message or {}
            begun = {"role": message.get("role", _ASSISTANT), "content": _NO_TEXT}
            shown = self._event(
                {"index": 0, "delta": begun, "logprobs": None, "finish_reason": None}, _NO_PROMPT
            )
        if not self.is_all:
            return shown + self._event(self._content(None))
        return shown + self._end()

    def _end(self) -> bytes:
        """Return the events of a token that is all of the answer."""
        answer = self._answer
        fingerprint = b""
        if answer.system_fingerprint != NULL:
            fingerprint = b',"system_fingerprint":' + bytes(answer.system_fingerprint)
        options = maybe(self.fields.get("stream_options", NULL), Fields) or {}
        if options.get("include_usage") != TRUE:
            return self._event(self._content("stop"), fingerprint) + _DONE
        counts = {name: value for name, value in (answer.usage or {}).items() if value != NULL}
        counted = self._event(None, b',"usage":' + encode(counts) + fingerprint)
        return self._event(self._content("stop")) + counted + _DONE

    def _content(self, finish: str | None) -> dict[str, object]:
        if self.api is _COMPLETIONS:
            return {
                "index": 0,
                "text": self._text,
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": self._choice.stop_reason,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        choice: dict[str, object] = {"index": 0, "delta": {"content": self._text}, "logprobs": None}
        choice["finish_reason"] = finish
        if finish:
            choice["stop_reason"] = self._choice.stop_reason
        choice["token_ids"] = None
        return choice

    def _event(self, choice: dict[str, object] | None, more: bytes = b"") -> bytes:
        """Write an event; ``choice``: its only one; ``more``: the fields behind it."""
        written = b"" if choice is None else msgspec.json.encode(choice)
        return self._begin + written + b"]" + more + b"}\n\n"

    def decode_fields(self, fields: Fields, params: msgspec.Raw) -> Fields:
        """Return what a decode engine is asked that reads the blocks; ``fields`` are those for a
        whole answer.
        """
        behind = limits_behind(self.api, fields, 1)
        if behind is None:
            raise RuntimeError("there is no second token")  # such a request is not split
        if self.api is _COMPLETIONS:
            return fields | behind | {"prompt": self._tokens(), "kv_transfer_params": params}
        return fields | behind | {"kv_transfer_params": with_ids(params, self._tokens())}

    def alone_fields(self) -> Fields:
        """Return what a decode engine is asked that computes the prompt itself."""
        return (
            with_model_of(self.head, self.fields)
            | (limits_behind(self.api, self.fields, 1) or {})
            | prompt_of(self.api, self._tokens())
        )

    def _tokens(self) -> msgspec.Raw:
        """Return the prompt and the token; they may be many, and are not read."""
        return msgspec.Raw(bytes(self.prompt).rstrip()[:-1] + b",%d]" % self.token)

    def continuation(self, *, can_resume: bool) -> Continuation:
        """Return what joins the decode engine's stream to it."""
        if not can_resume:
            return Spliced(self)
        prompt = maybe(self.prompt, list[int]) or []
        return behind(self.api, self.fields, prompt=prompt, token=self.token, head=self.head)


def first_token(
    api: Api,
    fields: Fields,
    offer: FirstTokenOffer,
    answer: TokensAnswer | None,
    counted: int | None,
) -> FirstToken | None:
    """Return the token of a prefill engine's answer; None: it cannot be shown.

    ``counted``: tokens of the prompt.
    """
    if (
        answer is None
        or len(answer.choices) != 1
        or answer.usage is None
        or NULL in (answer.id, answer.created, answer.model)
    ):
        return None
    (choice,) = answer.choices
    tokens = choice.token_ids
    is_completion = api is _COMPLETIONS
    text = choice.text if is_completion else _content(choice)
    prompt = choice.prompt_token_ids if is_completion else answer.prompt_token_ids
    if (
        text is None
        or _HALF in text
        or tokens is None
        or len(tokens) != 1
        or bytes(prompt)[:1] != b"["
    ):
        return None
    if api is _CHAT and not _MARKS.isdisjoint(text):
        return None
    if choice.finish_reason != "stop" and (choice.finish_reason != "length" or not text):
        return None
    if counted is None or counted + 1 >= offer.max_model_len:
        return None
    return FirstToken(api, fields, answer, tokens[0], text, prompt)


def _content(choice: TokensChoice) -> str | None:
    """Return the text of a message that has nothing else."""
    message = choice.message or {}
    for name, value in message.items():
        if name not in _TEXT and value not in _EMPTY:
            return None
    return maybe(message.get("content", NULL), str)


class Spliced:
    """Implements Continuation for a stream that begins with a prefill engine's token."""

    __slots__ = ("_ends_event", "_first", "_is_read", "_passes", "_renamed", "broken")

    def __init__(self, first: FirstToken) -> None:
        self.broken = False
        self._first = first
        self._is_read = False  # the client has some of what the decode engine has made
        self._passes = False  # what comes may pass as bytes
        # what the decode engine calls the answer, and what we do
        self._renamed: list[tuple[bytes, bytes]] = []
        self._ends_event = False  # the end of an event that was left out is to come

    def feed(self, lines: bytes) -> bytes:
        """Take whole lines of the decode engine's stream; return what the client gets in their
        place.
        """
        if not self._passes or self._ends_event or lines.find(_USAGE) >= 0:
            return b"".join([self._line(line) for line in lines.splitlines(keepends=True)])
        return self._as_bytes(lines)

    def _as_bytes(self, lines: bytes) -> bytes:
        self._is_read = True
        for theirs, ours in self._renamed:
            lines = lines.replace(theirs, ours)  # in a text the quotes would be escaped
        return lines

    def gap(self) -> bytes:
        """Return nothing: no engine takes over once some of another one's is shown."""
        return b""

    def again(self) -> Fields | None:
        """Return what another engine is asked, if the client has nothing but the first token."""
        if self._is_read:
            return None
        self._passes = self._ends_event = False
        return self._first.alone_fields()

    def can_move(self) -> bool:
        """Return False: what the decode engine makes is not read."""
        return False

    def rest(self) -> Rest | None:
        """Return None: what the decode engine makes is not read."""
        return None

    def ending(self) -> bytes | None:
        """Return None: the end is the decode engine's."""
        return None

    def _line(self, line: bytes) -> bytes:
        if self._ends_event and not line.strip():
            self._ends_event = False
            return b""
        if line == b"\n":  # the end of an event
            return line
        if not self._passes:
            self._learn(line)
            if line.startswith(_DATA) and _is_role(line[len(_DATA) :]):
                self._ends_event = True
                return b""
        if self._passes and line.find(_USAGE) < 0:
            return self._as_bytes(line)
        chunk = maybe(line[len(_DATA) :], Fields) if line.startswith(_DATA) else None
        if chunk is None or "error" in chunk:
            return line
        self._is_read = True
        for name in _IN_ALL:
            if name in chunk:
                chunk[name] = self._first.head[name]
        if "usage" in chunk and (usage := maybe(chunk["usage"], Fields)):
            chunk["usage"] = _whole_usage(usage)
        return _DATA + b" " + encode(chunk) + b"\n"

    def _learn(self, line: bytes) -> None:
        """See what the decode engine says in all of its events; where it writes them otherwise,
        each is parsed.
        """
        begun = _BEGINNING.match(line)
        if begun is None:
            return
        self._passes = True
        head = self._first.head
        self._renamed = [(begun[1], b'"id":%b,' % head["id"])]
        ours = b'"created":%b,' % head["created"]
        if begun[2] != ours:
            self._renamed.append((begun[2], ours))


def _is_role(written: bytes) -> bool:
    """Tell the event that only says who speaks."""
    if written.find(_ROLE) < 0 and _BACKSLASH not in written:  # a name may be written in escapes
        return False
    event = maybe(written, RoleEvent)
    choices = () if event is None else event.choices
    for choice in choices:
        if choice.delta is None or choice.delta.role is UNSET:
            return False
        text = maybe(choice.delta.content, str)
        if text:
            return False
    return bool(choices)


def _whole_usage(usage: Fields) -> msgspec.Raw:
    """Count as one engine would have: the first token is none of the prompt's.

    A decode engine reads all but the last token of a prompt. Where the token was shown that is all
    of the client's.
    """
    prompt_tokens = (maybe(usage.get("prompt_tokens", NULL), int) or 1) - 1
    completion_tokens = (maybe(usage.get("completion_tokens", NULL), int) or 0) + 1
    return usage_of_one_engine(usage, prompt_tokens, completion_tokens)
