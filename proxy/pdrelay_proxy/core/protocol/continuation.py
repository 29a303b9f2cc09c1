"""Continues a stream behind tokens that the client has: the request for the rest of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.client_body import names_no_model
from pdrelay_proxy.core.raw_json import NULL, Fields, maybe, to_raw

_COMPLETIONS: Final = Api.COMPLETIONS
_DEFAULT_LIMIT: Final = (
    16  # of completions without max_tokens (vllm/entrypoints/openai/completion/protocol.py)
)
_LIMITS: Final = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Rest:
    """The request for the rest of a stream, apart from its prompt."""

    # the client's, with the remaining limits, and without the fields that ``tokens`` replaces
    fields: Fields
    tokens: msgspec.Raw  # the prompt and the generated tokens


class Continuation(Protocol):
    """One stream, as the client sees it, whichever engines generate it."""

    broken: bool  # the engine reported a failure; what came before may go to the client

    def feed(self, lines: bytes) -> bytes:
        """Read whole lines of an engine's stream; return the lines for the client."""
        ...

    def gap(self) -> bytes:
        """Return what must precede the next event, if the last one was cut off in the middle."""
        ...

    def again(self) -> Fields | None:
        """Return the request for another engine after a break; None: none can continue."""
        ...

    def can_move(self) -> bool:
        """Return whether the stream could be cut now, and continue exactly at another engine."""
        ...

    def rest(self) -> Rest | None:
        """Return the same as ``again``, in parts."""
        ...

    def ending(self) -> bytes | None:
        """Return the rest of a stream that broke off behind its last token; None: it did not."""
        ...


def limits(api: Api, fields: Fields) -> Mapping[str, int]:
    """Return a client's limits of tokens, by the names that it has used."""
    limits_by_name: dict[str, int] = {}
    for name in _LIMITS:
        if name in fields and (limit := maybe(fields[name], int)) is not None:
            limits_by_name[name] = limit
    if api is _COMPLETIONS and "max_tokens" not in fields:
        limits_by_name["max_tokens"] = _DEFAULT_LIMIT
    return limits_by_name


def least(fields: Fields) -> int:
    """Return the client's minimum of tokens."""
    return (maybe(fields["min_tokens"], int) or 0) if "min_tokens" in fields else 0


def limits_behind(api: Api, fields: Fields, generated: int) -> Fields | None:
    """Return the limits that remain behind ``generated`` tokens; None: no token may follow."""
    remaining: Fields = {}
    for name, limit in limits(api, fields).items():
        if limit <= generated:
            return None
        remaining[name] = to_raw(limit - generated)
    if minimum := least(fields):
        remaining["min_tokens"] = to_raw(max(0, minimum - generated))
    return remaining


def prompt_of(api: Api, tokens: msgspec.Raw) -> Fields:
    """Return the fields that make tokens the prompt of a request."""
    if api is _COMPLETIONS:
        return {"prompt": tokens}
    # the ids take precedence over the messages
    return {"kv_transfer_params": to_raw({"prompt_token_ids": tokens})}


def with_model_of(head: Fields, fields: Fields) -> Fields:
    """Name the model in a request for the rest of a stream, if its client has named none: another
    engine may serve another one, and says so; ``head``: of the events so far.
    """
    if "model" not in head or not names_no_model(fields):
        return fields
    return fields | {"model": head["model"]}


def usage_of_one_engine(usage: Fields, prompt_tokens: int, completion_tokens: int) -> msgspec.Raw:
    """Return an engine's usage with the counts that a single engine would have had.

    An engine that goes on behind tokens which were shown counts these as part of its prompt. A
    single one has at most all but the last token of the prompt cached.
    """
    counts: Fields = {
        "prompt_tokens": to_raw(prompt_tokens),
        "completion_tokens": to_raw(completion_tokens),
        "total_tokens": to_raw(prompt_tokens + completion_tokens),
    }
    details = maybe(usage.get("prompt_tokens_details", NULL), Fields)
    if details is not None:
        cached = maybe(details.get("cached_tokens", NULL), int)
        if cached is not None:
            most = max(prompt_tokens - 1, 0)
            counts["prompt_tokens_details"] = to_raw(
                details | {"cached_tokens": to_raw(min(cached, most))}
            )
    return to_raw(usage | counts)
