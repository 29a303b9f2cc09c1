"""A canary: a greedy request that one engine answers again, without KV from another, and whether both texts agree.

Two engines that are well can make different texts of one prompt: sums in bf16 depend on what else is in the batch, and
where two tokens are about equally likely the other one may win. So the repetition has logprobs, and a difference counts
only if no such place explains it.
"""

from enum import auto
from typing import Final

import msgspec

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.model import Api, GenerationRequest
from pdrelay_proxy.core.raw_json import FALSE, NULL, TRUE, Fields, maybe
from pdrelay_proxy.core.schemas.canary import ChatPlaces, OtherToken, ShownAnswer, ShownPart, TextPlaces, TokenPlace

CANARY: Final = "-canary"  # behind the name of the request that is repeated
TOKENS_MOST: Final = 64  # of an answer that are compared
MARGIN: Final = 0.25  # difference of two logprobs below which either token may win
REQUEST_MOST: Final = 1 << 18  # bytes of a request that is repeated
_OTHERS: Final = 5  # likeliest tokens of each place that the engine is asked for; vLLM's own limit is 20
_COMPLETIONS, _CHAT = Api.COMPLETIONS, Api.CHAT  # looking a member up takes as long as a call
# What makes several texts of one request, or a text of something beside its tokens.
_UNSUITED: Final = frozenset(
    {"tools", "tool_choice", "functions", "use_beam_search", "best_of", "echo", "suffix", "prompt_embeds", "audio"}
)
_LEFT_OUT: Final = frozenset(
    {"stream_options", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"}
)
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_LINES: Final = b"data:"
_NO_CALLS: Final = b"null", b"[]"
_GARBLED: Final = "�"  # of a character whose bytes are in several tokens
_NUMBERED: Final = "token_id:"  # in place of a token's text, with vLLM's --return-tokens-as-token-ids


class CanaryOutcome(FastStrEnum):
    """How a repetition ended."""

    EQUAL = auto()  # the texts agree, as far as both go
    DIFFERENT = auto()
    SKIPPED = auto()  # it was not repeated, or what differs may be rounding
    FAILED = auto()  # the engine gave no answer that can be compared


def may_repeat(call: GenerationRequest) -> bool:
    """Tell whether one engine must make the same text of a request: it is greedy, of one prompt, and not too long."""
    fields = call.fields
    if call.api not in (_COMPLETIONS, _CHAT) or not _UNSUITED.isdisjoint(fields):
        return False
    if maybe(fields.get("temperature", NULL), float) != 0.0 or maybe(fields.get("n", NULL), int) not in (None, 1):
        return False
    if call.api is _COMPLETIONS and not _is_one_prompt(bytes(fields.get("prompt", NULL)).lstrip()):
        return False
    return sum([len(memoryview(value)) for value in fields.values()]) <= REQUEST_MOST


def _is_one_prompt(prompt: bytes) -> bool:
    """Tell a text or the token ids of one from several."""
    return prompt[:1] == b'"' or (prompt[:1] == b"[" and prompt[1:].lstrip()[:1].isdigit())


def repetition(call: GenerationRequest) -> Fields:
    """Return the body for one engine: the first tokens, whole, with the likeliest tokens of each place."""
    fields = {name: value for name, value in call.fields.items() if name not in _LEFT_OUT}
    given = [limit for name in _LIMITS if (limit := maybe(fields.get(name, NULL), int)) is not None]
    most = _number(min([TOKENS_MOST, *given]))
    fields["stream"] = FALSE
    fields.update(dict.fromkeys([name for name in _LIMITS if name in fields] or _LIMITS[:1], most))
    if (least := maybe(fields.get("min_tokens", NULL), int)) is not None:
        fields["min_tokens"] = _number(min(least, TOKENS_MOST, *given))
    if call.api is _CHAT:
        fields["logprobs"], fields["top_logprobs"] = TRUE, _number(_OTHERS)
    else:
        fields["logprobs"] = _number(_OTHERS)
    return fields


def _number(value: int) -> msgspec.Raw:
    return msgspec.Raw(b"%d" % value)


def shown_text(body: bytes, *, streams: bool) -> str | None:
    """Return the text that a client got; None: there is something beside it, an error, or what is no answer."""
    if not streams:
        return _text_of([body])
    events = [line[len(_LINES) :].strip() for line in body.splitlines() if line.startswith(_LINES)]
    return _text_of(events[:-1]) if events and events[-1] == b"[DONE]" else None


def _text_of(answers: list[bytes]) -> str | None:
    text = list[str]()
    for body in answers:
        answer = maybe(body, ShownAnswer)
        if answer is None or answer.error != NULL or len(answer.choices) > 1:
            return None
        for choice in answer.choices:
            said = choice.message or choice.delta or ShownPart(content=choice.text)
            if said.reasoning_content or said.reasoning or bytes(said.tool_calls) not in _NO_CALLS:
                return None
            text.append(said.content or "")
    return "".join(text)


def compared(api: Api, shown: str, repeated: bytes) -> CanaryOutcome:
    """Compare the text that the client got with the whole answer of one engine to the ``repetition``."""
    answer, again = maybe(repeated, ShownAnswer), _text_of([repeated])
    if answer is None or again is None or len(answer.choices) != 1:
        return CanaryOutcome.FAILED
    choice = answer.choices[0]
    if shown == again or (choice.finish_reason == "length" and shown.startswith(again.rstrip(_GARBLED))):
        return CanaryOutcome.EQUAL
    places = _places(api, choice.logprobs)
    if places is None:
        return CanaryOutcome.FAILED
    return CanaryOutcome.SKIPPED if _may_be_rounding(shown, places) else CanaryOutcome.DIFFERENT


def _places(api: Api, logprobs: msgspec.Raw) -> list[TokenPlace] | None:
    if api is _CHAT:
        chat = maybe(logprobs, ChatPlaces)
        return None if chat is None else chat.content
    found = maybe(logprobs, TextPlaces)
    if found is None or not len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs):
        return None
    return [
        TokenPlace(token, logprob or 0.0, [OtherToken(*each) for each in (others or {}).items()])
        for token, logprob, others in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    ]


def _may_be_rounding(shown: str, places: list[TokenPlace]) -> bool:
    """Tell whether the shown text leaves the repeated tokens at a place where another token is about as likely.

    A token's text may begin another's, so each place on the way is looked at.
    """
    at = 0
    for place in places:
        if _GARBLED in place.token or place.token.startswith(_NUMBERED):
            return True  # its text is not known
        near = [
            other.token
            for other in place.top_logprobs
            if other.token != place.token and place.logprob - other.logprob <= MARGIN
        ]
        if near and at == len(shown):
            return True  # the shown text may have ended with one of these
        if any(_GARBLED in token or shown.startswith(token, at) for token in near):
            return True
        if not shown.startswith(place.token, at):
            return False
        at += len(place.token)
    return False
