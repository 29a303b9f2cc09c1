"""A stream that goes on behind tokens which the client has already: what an engine is asked for the
rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.raw_json import Fields, encode, maybe

_COMPLETIONS: Final = Api.COMPLETIONS  # looking a member up takes as long as a call
_DEFAULT_LIMIT: Final = 16  # of completions that do not say
_LIMITS: Final = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Rest:
    """What an engine is asked for the rest of a stream, apart from its prompt."""

    fields: Fields  # the client's, with the limits that are left, and without those of ``tokens``
    tokens: msgspec.Raw  # the prompt, and the tokens that were made


class Continuation(Protocol):
    """One stream, as the client sees it, whichever engines make it."""

    broken: bool  # the engine has said that it failed; what came before may be shown

    def feed(self, lines: bytes) -> bytes:
        """Take whole lines of an engine's stream; return what the client gets in their place."""
        ...

    def gap(self) -> bytes:
        """Return what must come before the next event, when the one before was cut off behind a
        line of it.
        """
        ...

    def again(self) -> Fields | None:
        """The engine has broken off: return what another one is asked; None: nobody can go on."""
        ...

    def can_move(self) -> bool:
        """Tell whether the stream could be cut now, and go on exactly at another engine."""
        ...

    def rest(self) -> Rest | None:
        """Return the same as ``again``, in parts."""
        ...

    def ending(self) -> bytes | None:
        """Return the rest of a stream whose last token was there when it broke off; None: it was
        not.
        """
        ...


def limits(api: Api, fields: Fields) -> Mapping[str, int]:
    """Return how many tokens a client wants at most, by the names that it has used."""
    said: dict[str, int] = {}
    for name in _LIMITS:
        if name in fields and (limit := maybe(fields[name], int)) is not None:
            said[name] = limit
    if api is _COMPLETIONS and "max_tokens" not in fields:
        said["max_tokens"] = _DEFAULT_LIMIT
    return said


def least(fields: Fields) -> int:
    """Return how many tokens a client wants at least."""
    return (maybe(fields["min_tokens"], int) or 0) if "min_tokens" in fields else 0


def limits_behind(api: Api, fields: Fields, made: int) -> Fields | None:
    """Return the limits behind so many tokens; None: there is no room for another."""
    behind: Fields = {}
    for name, limit in limits(api, fields).items():
        if limit <= made:
            return None
        behind[name] = raw(limit - made)
    if wanted := least(fields):
        behind["min_tokens"] = raw(max(0, wanted - made))
    return behind


def prompt_of(api: Api, tokens: msgspec.Raw) -> Fields:
    """Return the fields that make tokens the prompt of a request."""
    if api is _COMPLETIONS:
        return {"prompt": tokens}
    # they win over the messages
    return {"kv_transfer_params": raw_fields({"prompt_token_ids": tokens})}


def raw(value: object) -> msgspec.Raw:
    """Write a value."""
    return msgspec.Raw(msgspec.json.encode(value))


def raw_fields(fields: Fields) -> msgspec.Raw:
    """Write an object inside another."""
    return msgspec.Raw(encode(fields))
