"""Several prompts in one request: each becomes a request of its own, and their answers become one
again.

vLLM numbers the choices of all prompts in one row: those of the prompt at place ``i`` begin at ``i
* n`` (vllm/entrypoints/openai/completion/serving.py). The usage counts all of them; cached tokens,
too, of which vLLM tells those of one prompt.
"""

from collections.abc import Sequence
from typing import Final, TypeGuard

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.engine_errors import words_of
from pdrelay_proxy.core.raw_json import NULL, Fields, NotJson, decode, encode, maybe, to_raw
from pdrelay_proxy.errors import EngineError

_PROMPT: Final = "prompt"
_COMPLETIONS: Final = Api.COMPLETIONS
_BRACKET: Final = 91
_QUOTE: Final = 34
_LOOK: Final = 64  # bytes in which the first item must begin; no client writes more white space
_WHITESPACE: Final = b" \t\n\r"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_NO_CHOICES: Final = msgspec.Raw(b"[]")


def prompts_of(api: Api, fields: Fields) -> Sequence[msgspec.Raw]:
    """Return the prompts of a request that has several, all texts or all lists of token ids; else
    nothing.
    """
    raw = fields.get(_PROMPT) if api is _COMPLETIONS else None
    if raw is None:
        return ()
    view = memoryview(raw)
    if not len(view) or view[0] != _BRACKET:
        return ()
    return _several(raw)


def _several(raw: msgspec.Raw) -> Sequence[msgspec.Raw]:
    first = bytes(memoryview(raw)[1:_LOOK]).lstrip(_WHITESPACE)[:1]
    if first not in (b'"', b"["):
        return ()  # token ids: one prompt, and maybe a long one
    prompts = maybe(raw, list[msgspec.Raw]) or []
    if len(prompts) < 2:
        return ()
    is_kind = _is_text if first == b'"' else _is_ids
    return prompts if all(is_kind(memoryview(prompt)) for prompt in prompts) else ()


def _is_text(prompt: memoryview) -> bool:
    return prompt[0] == _QUOTE


def _is_ids(prompt: memoryview) -> bool:
    return prompt[0] == _BRACKET and bytes(prompt[1:_LOOK]).lstrip(_WHITESPACE)[:1].isdigit()


def one_of(fields: Fields, prompt: msgspec.Raw) -> Fields:
    """Return the request for one of the prompts."""
    return fields | {_PROMPT: prompt}


def choices_of(fields: Fields) -> int:
    """Return for how many choices a request asks, of each prompt."""
    return maybe(fields.get("n", NULL), int) or 1


class _Merged:
    """What both kinds of answers have in common; ``name``: the ``id`` of the answer, ``n``: choices
    of each prompt.
    """

    __slots__ = ("_n", "_name", "_usages")

    def __init__(self, name: str, n: int) -> None:
        self._name = to_raw(name)
        self._n = n
        self._usages: list[msgspec.Raw] = []

    def _number(self, place: int, choices: Sequence[Fields]) -> None:
        """Give the choices of the prompt at a place their numbers in the whole answer."""
        for choice in choices:
            index = maybe(choice.get("index", NULL), int)
            if index is None or not 0 <= index < self._n:
                raise EngineError(
                    f"an engine numbered a choice {index}: it was asked for {self._n}, from 0 on"
                )
            choice["index"] = msgspec.Raw(b"%d" % (place * self._n + index))

    def _usage(self) -> msgspec.Raw:
        total: object = None
        for usage in self._usages:
            total = _sum(total, decode(usage, object))
        return to_raw(total)


class MergedAnswer(_Merged):
    """The whole answers to all prompts, made one."""

    __slots__ = ("_answers",)

    def __init__(self, name: str, n: int) -> None:
        _Merged.__init__(self, name, n)
        self._answers: dict[int, bytes] = {}  # by the place of the prompt

    def take(self, place: int, answer: bytes) -> None:
        """Keep the answer to the prompt at a place."""
        self._answers[place] = answer

    def whole(self) -> bytes:
        """Return the answer to all of them, in the order of the prompts.

        Raises:
            EngineError: one of them is not what vLLM answers.
        """
        first: Fields = {}
        choices: list[Fields] = []
        for place, answer in sorted(self._answers.items()):
            try:
                fields = decode(answer, Fields)
                own = decode(fields.get("choices", NULL), list[Fields])
                usage = fields.get("usage", NULL)
            except NotJson as exc:
                raise EngineError(
                    f"an engine answered the prompt at {place} with no completion: {exc}"
                ) from exc
            self._number(place, own)
            choices += own
            if usage != NULL:
                self._usages.append(usage)
            first = first or fields
        if "metrics" in first:
            first["metrics"] = NULL  # they are of one generation
        usage = self._usage()
        return encode(
            first
            | {
                "id": self._name,
                "choices": to_raw(choices),
                "usage": usage,
            }
        )


class MergedStream(_Merged):
    """The events of the answers to all prompts, as one stream."""

    __slots__ = ("_created", "_usage_event")

    def __init__(self, name: str, n: int) -> None:
        _Merged.__init__(self, name, n)
        self._created: msgspec.Raw | None = None  # of the first event
        self._usage_event: Fields | None = None  # the latest: what stands around the usage of all

    def feed(self, place: int, lines: bytes) -> bytes:
        """Take whole lines of the stream for the prompt at a place; return what the client gets of
        them.

        Raises:
            EngineError: an event is an error, or not what vLLM sends.
        """
        events = [
            self._event(place, data)
            for line in lines.splitlines()
            if line.startswith(_DATA) and (data := line[len(_DATA) :].strip()) != _DONE
        ]
        return b"".join(events)

    def end(self) -> bytes:
        """Return the end of the whole stream."""
        done = b"data: [DONE]\n\n"
        if self._usage_event is None:
            return done
        last = self._usage_event | {
            "id": self._name,
            "choices": _NO_CHOICES,
            "usage": self._usage(),
        }
        last.pop("metrics", None)  # they are of one generation
        if self._created is not None:
            last["created"] = self._created
        return b"data: %b\n\n%b" % (encode(last), done)

    def _event(self, place: int, data: bytes) -> bytes:
        try:
            fields = decode(data, Fields)
            choices = [] if (said := fields.get("choices")) is None else decode(said, list[Fields])
        except NotJson as exc:
            raise EngineError(
                f"an engine sent an event for the prompt at {place} that is no completion"
            ) from exc
        if "error" in fields:
            raise EngineError(words_of(data) or "an engine sent an error in its stream")
        if not choices:
            if (usage := fields.get("usage", NULL)) != NULL:
                self._usages.append(usage)
                self._usage_event = fields
            return b""
        self._number(place, choices)
        if self._created is None:
            self._created = fields.get("created", NULL)
        again = {
            "id": self._name,
            "created": self._created,
            "choices": to_raw(choices),
        }
        return b"data: %b\n\n" % encode(
            fields | {name: raw for name, raw in again.items() if name in fields}
        )


def _sum(first: object, other: object) -> object:
    """Add up what is a number, wherever it stands."""
    if first is None or other is None:
        return other if first is None else first
    if _is_object(first) and _is_object(other):
        return {name: _sum(first.get(name), other.get(name)) for name in {**first, **other}}
    if isinstance(first, int) and isinstance(other, int):
        return first + other
    return first


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)
