"""Going on with a stream that has broken off: what another engine is asked, and how its stream
continues the first.

The engines are asked for token ids beside the text. Another engine that gets prompt and generated
tokens as its prompt goes on where the first has stopped: under greedy decoding with the very same
tokens. Ids win over texts because a text may be split into tokens in more than one way.

A token may be half a character, whose text comes with the next one. So a point is only safe to go
on from when an event of a single token had a text: that is all of it. What comes after the last
such point is made again, and the part of its text that the client has is left out. That is only the
same text under greedy decoding.

In a chat it may not be all of it. A parser of tool calls keeps the end of a text that could begin
one of its literals ("<") until it knows more, also where the client has no tools (``prefix-match
buffering`` in vllm/parser/engine/incremental_lexer.py), and gives it back with the next text. So a
chat's point is safe when the next text does not begin so. Of a sampled stream nothing may be made
again. It goes on behind a letter or a digit, for no token has punctuation behind these; but one
literal begins with a letter (Gemma's "call:" with a "c", so that of "music" the "c" comes later),
so behind a letter only when the engine has been seen to tell of a "c" at an end.

Only fields that are known to survive this are let through: what looks back at the tokens made so
far (penalties, stop texts, guided decoding, tools, logprobs) would begin anew, and a seed would
begin anew with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.continuation import Rest, limits_behind, prompt_of, raw, raw_fields
from pdrelay_proxy.core.protocol.first_token import FirstToken
from pdrelay_proxy.core.raw_json import NULL, TRUE, Fields, encode, maybe
from pdrelay_proxy.core.schemas import PlainMessage

# Whatever their value: they do not depend on where a request begins.
_FREE: Final = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "user",
        "stop_token_ids",
        "priority",
    }
    | {
        "ignore_eos",
        "min_tokens",
        "max_tokens",
        "logit_bias",
        "allowed_token_ids",
        "cache_salt",
        "session_id",
    }
    | {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "repetition_penalty",
    }
)
_FREE_OF: Final[Mapping[Api, frozenset[str]]] = {
    Api.COMPLETIONS: _FREE | {"prompt"},
    Api.CHAT: _FREE
    | {"messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "chat_template_kwargs", "documents"},
}
_CHAT: Final = Api.CHAT  # looking a member up takes as long as a call
_ZERO: Final = (b"0", b"0.0")
_MESSAGES_MOST: Final = 1024 * 1024  # bytes that are decoded to look at them
_DATA: Final = b"data:"
_DONE: Final = b"data: [DONE]\n\n"
_DROPPED: Final = b": goes on\n"  # a comment: clients do not see it
_TOKENS: Final = ("token_ids", "prompt_token_ids")
_NOWHERE: Final = 0, 0
_KEPT_LETTER: Final = "c"  # the only one that begins a literal of vLLM 0.32's parsers


def can_resume(api: Api, fields: Fields) -> bool:
    """Tell whether a request's stream can be continued by another engine."""
    free = _FREE_OF.get(api)
    if free is None or fields.get("stream") != TRUE:
        return False
    if not free.issuperset(fields):
        odd = [(name, value) for name, value in fields.items() if name not in free]
        if not all(_is_neutral(name, value, fields) for name, value in odd):
            return False
    return api is not _CHAT or _is_text_only(fields.get("messages", NULL))


def may_be_kept(text: str) -> bool:
    """Tell whether a text of a chat may begin with what a parser has kept back of the one
    before.
    """
    first = text[0]
    return first == _KEPT_LETTER or not (first.isalnum() or first.isspace())


def traced(fields: Fields) -> Fields:
    """Ask for the token ids as well."""
    return fields | {"return_token_ids": TRUE}


@dataclass(slots=True)
class Replay:
    """Implements Continuation for a stream that has broken off anywhere."""

    api: Api
    fields: Fields  # the client's
    broken: bool = False  # the engine has said that it failed; what came before may be shown
    _prompt: list[int] = field(default_factory=list[int])
    # tokens whose text is with the client, all of it
    _shown: list[int] = field(default_factory=list[int])
    _ahead: list[int] = field(default_factory=list[int])  # tokens after these
    # how many of these, and how much of their text, are with the client as it seems
    _point: tuple[int, int] = _NOWHERE
    _text: str = ""  # of those, as far as this engine has told it
    _again: str = ""  # text that is with the client, and that this engine is going to make again
    _before: int = 0  # tokens of earlier engines
    # of the first event: one stream has one id
    _head: Fields = field(default_factory=dict[str, msgspec.Raw])
    _finished: bool = False
    _spoilt: bool = False  # it has become something that cannot be continued
    _resumed: bool = False
    _counted: bool = False  # the client has its usage
    # the client has the beginning of an event, and not the empty line that ends it
    _inside: bool = False
    _keeps_no_letter: bool = False  # as far as a chat's texts show

    def feed(self, lines: bytes) -> bytes:
        """Take whole lines of the engine's stream; return what the client gets in their place."""
        shown = [
            passing for line in lines.splitlines(keepends=True) if (passing := self._line(line))
        ]
        if shown:
            self._inside = bool(shown[-1].strip())
        return b"".join(shown)

    def gap(self) -> bytes:
        """Return what must come before the next event, when the one before was cut off behind a
        line of it.
        """
        inside = self._inside
        self._inside = False
        return b"\n" if inside else b""

    def again(self) -> Fields | None:
        """The engine has broken off: return what another one is asked; None: nobody can go on."""
        rest = self.rest()
        return None if rest is None else rest.fields | prompt_of(self.api, rest.tokens)

    def can_move(self) -> bool:
        """Tell whether the stream could be cut now; not before its last token, which is as near
        here.
        """
        made = len(self._shown)
        limits = limits_behind(self.api, self.fields, made + 1)
        if (
            limits is None
            or not made
            or not self._prompt
            or self.broken
            or self._spoilt
            or self._finished
        ):
            return False
        return self._is_greedy() or not (self._text or self._again)

    def rest(self) -> Rest | None:
        """Return the same as ``again``, in parts."""
        left = limits_behind(self.api, self.fields, len(self._shown))
        again = self._text + self._again
        if left is None or not self._prompt or self._spoilt or self._finished:
            return None
        if again and not self._is_greedy():
            return None
        self._ahead.clear()
        self._text = ""
        self._again = again
        self._point = _NOWHERE
        self._before = len(self._shown)
        self._resumed = True
        self.broken = False
        return Rest(traced(self.fields) | left, raw([*self._prompt, *self._shown]))

    def ending(self) -> bytes | None:
        """Return the rest of a stream whose last token was there when it broke off; None: it was
        not.
        """
        if not self._finished:
            return None
        options = maybe(self.fields.get("stream_options", NULL), Fields) or {}
        if self._counted or options.get("include_usage") != TRUE:
            return _DONE
        chunk = self._head | {
            "choices": msgspec.Raw(b"[]"),
            "usage": self._usage({}, len(self._shown + self._ahead)),
        }
        return b"data: " + encode(chunk) + b"\n\n" + _DONE

    def _is_greedy(self) -> bool:
        return bytes(self.fields.get("temperature", NULL)) in _ZERO

    def _line(self, line: bytes) -> bytes:
        if self.broken:
            return b""
        if not line.startswith(_DATA) or line[len(_DATA) :].lstrip().startswith(b"[DONE]"):
            return line
        chunk = maybe(line[len(_DATA) :], Fields)
        if chunk is None:
            return line
        if "error" in chunk:
            self.broken = True
            return b""
        is_news = self._takes(chunk)
        return b"data: " + encode(chunk) + b"\n" if is_news and not self.broken else _DROPPED

    def _takes(self, chunk: Fields) -> bool:
        """Read a chunk and make it one of the client's; False: it is not for the client."""
        if not self._head:
            self._head = {
                name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk
            }
        if self._resumed:
            chunk.update(
                {name: self._head[name] for name in ("id", "created") if name in self._head}
            )
        self._hide(chunk)
        choices = maybe(chunk.get("choices", NULL), list[Fields]) or []
        is_news = all([self._reads(choice) for choice in choices])  # noqa: C419 (each must be read)
        chunk["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        self._counted = self._counted or (not choices and chunk.get("usage", NULL) != NULL)
        if said := maybe(chunk.get("usage", NULL), Fields):
            chunk["usage"] = self._usage(
                said, self._before + (maybe(said.get("completion_tokens", NULL), int) or 0)
            )
        return is_news

    def _reads(self, choice: Fields) -> bool:
        """Take in the tokens of a choice; False: it only repeats how a stream begins."""
        tokens = maybe(choice.get("token_ids", NULL), list[int]) or []
        self._hide(choice)
        delta = maybe(choice.get("delta", NULL), Fields) or {}
        text = maybe(choice.get("text", delta.get("content", NULL)), str) or ""
        news = self._skip(text)
        if news != text:
            _set_text(choice, delta, news)
        if text and self._point != _NOWHERE:
            if may_be_kept(text):
                self._point = _NOWHERE
            else:
                self._keep(*self._point)
        self._keeps_no_letter = self._keeps_no_letter or text.endswith(_KEPT_LETTER)
        self._ahead += tokens
        self._text += text
        if text and len(tokens) == 1:
            self._point = len(self._ahead), len(self._text)
            if self.api is not _CHAT or (not self._is_greedy() and self._seems_whole(text)):
                self._keep(*self._point)
        if any(
            maybe(value, object) for name, value in delta.items() if name not in ("role", "content")
        ):
            self._spoilt = True
            # a parser that began anew takes what follows for something else
            self.broken = self.broken or self._resumed
        is_last = choice.get("finish_reason", NULL) != NULL
        if is_last and self._again:
            self.broken = self._spoilt = True  # it has less to say than the client has
        self._finished = self._finished or (is_last and not self._spoilt)
        return bool(not self._resumed or news or is_last)

    def _seems_whole(self, text: str) -> bool:
        """Tell whether no parser keeps back an end of the token of a text, as tokens are."""
        last = text[-1]
        return self._keeps_no_letter if last.isascii() and last.isalpha() else last.isalnum()

    def _keep(self, tokens: int, text: int) -> None:
        """The client has all of the text of so many tokens."""
        self._shown += self._ahead[:tokens]
        del self._ahead[:tokens]
        self._text = self._text[text:]
        self._point = _NOWHERE

    def _skip(self, text: str) -> str:
        """Leave out what the client has already."""
        known = self._again[: len(text)]
        if not text.startswith(known):
            # the engines do not agree: an honest end is all that is left
            self.broken = self._spoilt = True
        self._again = self._again[len(known) :]
        return text[len(known) :]

    def _hide(self, fields: Fields) -> None:
        """Take out what the client has not asked for; the prompt's ids are kept."""
        if not self._prompt and (ids := maybe(fields.get("prompt_token_ids", NULL), list[int])):
            self._prompt = ids
        fields.update({name: NULL for name in _TOKENS if name in fields})

    def _usage(self, said: Fields, made: int) -> msgspec.Raw:
        """Count as one engine would have counted."""
        if not self._resumed and said:
            return msgspec.Raw(encode(said))
        asked = len(self._prompt)
        counts: Fields = {
            "prompt_tokens": raw(asked),
            "completion_tokens": raw(made),
            "total_tokens": raw(asked + made),
        }
        details = maybe(said.get("prompt_tokens_details", NULL), Fields)
        if (
            details is not None
            and (cached := maybe(details.get("cached_tokens", NULL), int)) is not None
        ):
            counts["prompt_tokens_details"] = raw_fields(
                details | {"cached_tokens": raw(min(cached, max(asked - 1, 0)))}
            )
        return msgspec.Raw(encode(said | counts))


def behind(first: FirstToken) -> Replay:
    """Return what follows the token of a prefill engine, which the client has."""
    prompt = maybe(first.prompt, list[int]) or []
    return Replay(
        first.api,
        first.fields,
        _prompt=prompt,
        _shown=[first.token],
        _before=1,
        _head=first.head,
        _resumed=True,
    )


def _set_text(choice: Fields, delta: Fields, text: str) -> None:
    if "text" in choice:
        choice["text"] = raw(text)
    else:
        choice["delta"] = msgspec.Raw(encode(delta | {"content": raw(text)}))


def _is_neutral(name: str, value: msgspec.Raw, fields: Fields) -> bool:
    """Tell values that mean nothing, in fields that could mean something."""
    if value == NULL or bytes(value) in (b"false", b"[]", b"{}"):
        return True
    if name in ("n", "best_of"):
        return bytes(value) == b"1"
    if name in ("presence_penalty", "frequency_penalty"):
        return bytes(value) in _ZERO
    return name == "seed" and bytes(fields.get("temperature", NULL)) in _ZERO


def _is_text_only(messages: msgspec.Raw) -> bool:
    """Tell chats of plain texts: others are rendered anew, and the replayed ids ignored."""
    if len(memoryview(messages)) > _MESSAGES_MOST:
        return False
    return maybe(messages, list[PlainMessage]) is not None
