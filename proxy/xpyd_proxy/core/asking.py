"""What the choice of engines gets to know of a request."""

from typing import Final

from xpyd_proxy.core.model import Ask, Call, Errand, Headers
from xpyd_proxy.core.raw_json import NULL, Fields, maybe
from xpyd_proxy.core.routing import PROMPTS

_PREFIX: Final = 16 * 1024  # bytes of a prompt that are shown


def ask_of_call(call: Call) -> Ask:
    """Describe a request that has a prompt."""
    prompt = memoryview(call.fields.get(PROMPTS[call.api], b""))[:_PREFIX]
    return Ask(model_of(call.fields), _session(call.headers), bytes(prompt), None, call.rank)


def ask_of_errand(errand: Errand) -> Ask:
    """Describe a request that is passed through."""
    return Ask(errand.model, _session(errand.headers), rank=errand.rank)


_MODELS: Final[dict[bytes, str | None]] = {}  # the same few, in nearly all requests
_MODELS_MOST: Final = 256
_MODEL_BYTES: Final = 256  # of a name that is remembered


def model_of(fields: Fields) -> str | None:
    """Return the model that a body names; None if it leaves that to the engine, or names it in an odd way."""
    raw = bytes(fields.get("model", NULL))
    if raw in _MODELS:
        return _MODELS[raw]
    model = maybe(raw, str)
    if len(raw) <= _MODEL_BYTES:
        if len(_MODELS) >= _MODELS_MOST:
            _MODELS.clear()
        _MODELS[raw] = model
    return model


def _session(headers: Headers) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == b"x-session-id"), None)
