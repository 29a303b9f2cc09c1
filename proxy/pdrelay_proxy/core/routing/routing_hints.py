"""What the choice of engines gets to know of a request."""

from functools import lru_cache
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api, GenerationRequest, RoutingHints
from pdrelay_proxy.core.protocol.client_body import names_no_model
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.raw_json import NULL, Fields, maybe, to_raw
from pdrelay_proxy.errors import BadRequest

_NO_PROMPT: Final = msgspec.Raw(b"")
# Their answers name the model that has made them, so that it need not be known before. Those of
# GENERATE do not, and engines refuse a request of MESSAGES that names none.
TELLS_MODEL: Final = frozenset({Api.COMPLETIONS, Api.CHAT, Api.RESPONSES})
_MODELS_MOST: Final = 256
_MODEL_BYTES: Final = 256  # of a name that is remembered


def hints_of_call(
    call: GenerationRequest, session: str | None = None, model: str | None = None
) -> RoutingHints:
    """Describe a request that has a prompt; ``model``: the one that it names or means; None: see
    what it names.
    """
    fields = call.fields
    prompt = memoryview(fields.get(PROMPTS[call.api], _NO_PROMPT))
    return RoutingHints(
        model_of(fields) if model is None else model,
        session,
        prompt,
        call.rank,
        context=fields,
    )


def model_of(fields: Fields) -> str | None:
    """Return the model that a body names; None if it leaves that to the engine, or names it in an
    odd way.

    An empty name leaves it to the engine, too (vllm/entrypoints/openai/models/serving.py).
    """
    raw = bytes(fields.get("model", NULL))
    return _known_model(raw) if len(raw) <= _MODEL_BYTES else maybe(raw, str) or None


def with_model(api: Api, fields: Fields, model: str) -> Fields:
    """Name the model of a request that leaves it to the engine: another engine may be there by now,
    and say so.

    /v1/messages wants a name, and engines refuse one without.
    """
    if api is Api.MESSAGES or not names_no_model(fields):
        return fields
    return fields | {"model": to_raw(model)}


@lru_cache(maxsize=_MODELS_MOST)  # the same few, in nearly all requests
def _known_model(raw: bytes) -> str | None:
    return maybe(raw, str) or None


def rank_of(header: bytes | None) -> int | None:
    """Return the rank in a client's X-data-parallel-rank, if it has one; raises BadRequest: it is
    no whole number.
    """
    number = (header or b"").strip()
    if not number:
        return None
    if number.isdigit() and len(number) < 10:
        return int(number)
    raise BadRequest(
        f"X-data-parallel-rank must be a whole number from 0 on, not {number.decode('latin-1')!r}"
    )
