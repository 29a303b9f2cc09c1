"""What a canary reads of a client's answer, and of the prefill engine's (core/protocol/canary.py)."""

from collections.abc import Mapping

import msgspec

from pdrelay_proxy.core.raw_json import NULL


class ShownPart(msgspec.Struct):
    """A message, or what an event adds to it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = NULL


class ShownChoice(msgspec.Struct):
    """A choice of a whole answer, or of an event."""

    text: str | None = None
    message: ShownPart | None = None
    delta: ShownPart | None = None
    finish_reason: str | None = None
    logprobs: msgspec.Raw = NULL


class ShownAnswer(msgspec.Struct):
    """A whole answer, or an event of a stream."""

    choices: list[ShownChoice] = []
    error: msgspec.Raw = NULL


class OtherToken(msgspec.Struct):
    """A token that could have followed."""

    token: str
    logprob: float


class TokenPlace(msgspec.Struct):
    """A token of a chat, and those that could have stood there."""

    token: str
    logprob: float
    top_logprobs: list[OtherToken] = []


class ChatPlaces(msgspec.Struct):
    """The logprobs of a chat."""

    content: list[TokenPlace] = []


class TextPlaces(msgspec.Struct):
    """The logprobs of a completion."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[Mapping[str, float] | None] = []
