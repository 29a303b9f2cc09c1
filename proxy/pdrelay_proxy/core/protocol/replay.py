"""Continues a broken stream at another engine: the request for it, and how its stream is joined to
the first.

The engines return token ids beside the text. Another engine that gets prompt and generated tokens
as its prompt continues where the first has stopped: under greedy decoding with the very same
tokens. Ids are better than texts because a text may be split into tokens in more than one way.

A token may be half a character, whose text comes with the next one. So a point is safe to continue
from only if an event of a single token had a text: that is its whole text. Tokens after the last
such point are generated again, and the part of their text that the client has is left out. The text
is the same only under greedy decoding.

In a chat it may not be the whole text. A parser of tool calls holds back the end of a text that
could begin one of its literals ("<") until it knows more, even if the client has no tools
(``prefix-match buffering`` in vllm/parser/engine/incremental_lexer.py), and releases it with the
next text. So a chat's point is safe if the next text does not begin so. Of a sampled stream nothing
may be generated again. It continues behind a letter or a digit, as no token has punctuation behind
these; but one literal begins with a letter (Gemma's "call:" with a "c", so the "c" of "music" comes
later), so behind a letter only if the engine has sent a "c" at an end before.

Only fields that are known to survive this are allowed: whatever depends on the tokens generated so
far (penalties, stop texts, guided decoding, tools, logprobs) would start again, and so would a
seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.continuation import (
    Rest,
    limits_behind,
    prompt_of,
    usage_of_one_engine,
    with_model_of,
)
from pdrelay_proxy.core.raw_json import FALSE, NULL, TRUE, Fields, encode, maybe, to_raw
from pdrelay_proxy.core.schemas import PlainMessage

# Allowed with any value: they do not depend on where a request begins.
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
_CHAT: Final = Api.CHAT
_ZERO: Final = (b"0", b"0.0")
# vLLM reads false as 0 there, which is not the same as no value; in a chat, logprobs is a switch
_NUMBERS: Final = frozenset(
    {
        "n",
        "best_of",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "thinking_token_budget",
        "truncate_prompt_tokens",
    }
)
_MESSAGES_MOST: Final = 1024 * 1024  # bytes of messages that are decoded to check them
_DATA: Final = b"data:"
_DONE: Final = b"data: [DONE]\n\n"
_ABORT: Final = b'"abort"'  # the engine has given it up (given_up.py)
_DROPPED: Final = b": goes on\n"  # a comment: clients skip it
_TOKENS: Final = ("token_ids", "prompt_token_ids")
_NOWHERE: Final = 0, 0
_KEPT_LETTER: Final = "c"  # the only letter that begins a literal of vLLM 0.32's parsers


def can_resume(api: Api, fields: Fields) -> bool:
    """Return whether another engine can continue a request's stream."""
    allowed = _FREE_OF.get(api)
    if allowed is None or fields.get("stream") != TRUE:
        return False
    if not allowed.issuperset(fields):
        other_fields = [(name, value) for name, value in fields.items() if name not in allowed]
        if not all(_is_neutral(api, name, value, fields) for name, value in other_fields):
            return False
    return api is not _CHAT or _is_text_only(fields.get("messages", NULL))


def may_be_kept(text: str) -> bool:
    """Return whether a chat's text may begin with what a parser held back of the text before."""
    first = text[0]
    return first == _KEPT_LETTER or not (first.isalnum() or first.isspace())


def traced(fields: Fields) -> Fields:
    """Request the token ids as well."""
    return fields | {"return_token_ids": TRUE}


@dataclass(slots=True)
class Replay:
    """Implements Continuation for a stream that may break off anywhere."""

    api: Api
    fields: Fields  # the client's
    broken: bool = False  # the engine reported a failure; what came before may go to the client
    _prompt: list[int] = field(default_factory=list[int])
    # tokens whose whole text the client has
    _shown: list[int] = field(default_factory=list[int])
    _ahead: list[int] = field(default_factory=list[int])  # tokens after these
    # how many of these, and how much of their text, the client seems to have completely
    _point: tuple[int, int] = _NOWHERE
    _text: str = ""  # text of the tokens ahead, as far as this engine has sent it
    _again: str = ""  # text that the client has, and that this engine will generate again
    _before: int = 0  # tokens of earlier engines
    # of the first event: one stream has one id
    _head: Fields = field(default_factory=dict[str, msgspec.Raw])
    _finished: bool = False
    _spoilt: bool = False  # the stream cannot be continued any more
    _resumed: bool = False
    _counted: bool = False  # the client has the stream's usage
    # the client has the beginning of an event, and not the empty line that ends it
    _inside: bool = False
    _keeps_no_letter: bool = False  # as far as a chat's texts show

    def feed(self, lines: bytes) -> bytes:
        """Read whole lines of the engine's stream; return the lines for the client."""
        shown = [
            client_line
            for line in lines.splitlines(keepends=True)
            if (client_line := self._line(line))
        ]
        if shown:
            self._inside = bool(shown[-1].strip())
        return b"".join(shown)

    def gap(self) -> bytes:
        """Return what must precede the next event, if the last one was cut off in the middle."""
        inside = self._inside
        self._inside = False
        return b"\n" if inside else b""

    def again(self) -> Fields | None:
        """Return the request for another engine after a break; None: none can continue."""
        rest = self.rest()
        return None if rest is None else rest.fields | prompt_of(self.api, rest.tokens)

    def can_move(self) -> bool:
        """Return whether the stream could be cut now; not if only its last token is missing."""
        shown = len(self._shown)
        limits = limits_behind(self.api, self.fields, shown + 1)
        if (
            limits is None
            or not shown
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
        fields = with_model_of(self._head, traced(self.fields))
        return Rest(fields | left, to_raw([*self._prompt, *self._shown]))

    def ending(self) -> bytes | None:
        """Return the rest of a stream that broke off behind its last token; None: it did not."""
        if not self._finished:
            return None
        options = maybe(self.fields.get("stream_options", NULL), Fields) or {}
        if self._counted or options.get("include_usage") != TRUE:
            return _DONE
        generated = len(self._shown) + len(self._ahead)
        if not generated:
            return None  # its engine hides them (include_reasoning): nobody can count them
        chunk = self._head | {
            "choices": msgspec.Raw(b"[]"),
            "usage": self._usage({}, generated),
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
        is_news = self._read_chunk(chunk)
        return b"data: " + encode(chunk) + b"\n" if is_news and not self.broken else _DROPPED

    def _read_chunk(self, chunk: Fields) -> bool:
        """Read a chunk and rewrite it for the client; False: it is not for the client."""
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
        if any([bytes(choice.get("finish_reason", NULL)) == _ABORT for choice in choices]):  # noqa: C419 (compiled, a generator takes longer)
            self.broken = True
            return False
        is_news = all([self._read_choice(choice) for choice in choices])  # noqa: C419 (each must be read)
        chunk["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        if engine_usage := maybe(chunk.get("usage", NULL), Fields):
            made = maybe(engine_usage.get("completion_tokens", NULL), int) or 0
            if not choices and not made:
                return False  # the engine has given it up: no answer has no token
            self._counted = self._counted or not choices
            chunk["usage"] = self._usage(engine_usage, self._before + made)
        return is_news

    def _read_choice(self, choice: Fields) -> bool:
        """Read the tokens of a choice; False: it only repeats how a stream begins."""
        tokens = maybe(choice.get("token_ids", NULL), list[int]) or []
        self._hide(choice)
        delta = maybe(choice.get("delta", NULL), Fields) or {}
        text = maybe(choice.get("text", delta.get("content", NULL)), str) or ""
        new_text = self._skip(text)
        if new_text != text:
            _set_text(choice, delta, new_text)
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
            # a parser that started again would misread what follows
            self.broken = self.broken or self._resumed
        is_last = choice.get("finish_reason", NULL) != NULL
        if is_last and self._again:
            self.broken = self._spoilt = True  # its text is shorter than the client's
        self._finished = self._finished or (is_last and not self._spoilt)
        return bool(not self._resumed or new_text or is_last)

    def _seems_whole(self, text: str) -> bool:
        """Return whether no parser holds back the end of this text, by its last character."""
        last = text[-1]
        return self._keeps_no_letter if last.isascii() and last.isalpha() else last.isalnum()

    def _keep(self, tokens: int, text: int) -> None:
        """Note that the client has the whole text of so many tokens."""
        self._shown += self._ahead[:tokens]
        del self._ahead[:tokens]
        self._text = self._text[text:]
        self._point = _NOWHERE

    def _skip(self, text: str) -> str:
        """Return the part of a text that the client does not have."""
        repeated = self._again[: len(text)]
        if not text.startswith(repeated):
            # the engines' texts differ: only an error is an honest end
            self.broken = self._spoilt = True
        self._again = self._again[len(repeated) :]
        return text[len(repeated) :]

    def _hide(self, fields: Fields) -> None:
        """Remove the ids, which the client did not request; the prompt's are kept here."""
        if not self._prompt and (ids := maybe(fields.get("prompt_token_ids", NULL), list[int])):
            self._prompt = ids
        fields.update({name: NULL for name in _TOKENS if name in fields})

    def _usage(self, engine_usage: Fields, generated: int) -> msgspec.Raw:
        """Return the usage that a single engine would have counted."""
        if not self._resumed and engine_usage:
            return to_raw(engine_usage)
        return usage_of_one_engine(engine_usage, len(self._prompt), generated)


def behind(api: Api, fields: Fields, *, prompt: list[int], token: int, head: Fields) -> Replay:
    """Return the Replay behind a token that the client has; ``head``: of the events so far."""
    return Replay(api, fields, _prompt=prompt, _shown=[token], _before=1, _head=head, _resumed=True)


def _set_text(choice: Fields, delta: Fields, text: str) -> None:
    if "text" in choice:
        choice["text"] = to_raw(text)
    else:
        choice["delta"] = to_raw(delta | {"content": to_raw(text)})


def _is_neutral(api: Api, name: str, value: msgspec.Raw, fields: Fields) -> bool:
    """Return whether a value means the same as no value."""
    if value == NULL or bytes(value) == b"[]":
        return True
    if value == FALSE:
        return name not in _NUMBERS or (name == "logprobs" and api is _CHAT)
    if name in ("n", "best_of"):
        return bytes(value) == b"1"
    if name in ("presence_penalty", "frequency_penalty"):
        return bytes(value) in _ZERO
    return name == "seed" and bytes(fields.get("temperature", NULL)) in _ZERO


def _is_text_only(messages: msgspec.Raw) -> bool:
    """Return whether all messages are plain texts: ids are ignored where others are rendered."""
    if len(memoryview(messages)) > _MESSAGES_MOST:
        return False
    return maybe(messages, list[PlainMessage]) is not None
