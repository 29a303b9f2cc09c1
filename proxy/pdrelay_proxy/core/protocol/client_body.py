"""Reads a client's body, and refuses what only the router may set.

Only the names of its fields are decoded. The values stay the client's own bytes, so that floats,
big integers, escapes and unknown fields arrive as they were sent. When a name occurs twice the last
value counts, as it does in vLLM, and only that one is sent on: both engines see the same request.
"""

import json
from typing import Final

import msgspec

from pdrelay_proxy.core.http.json_bounds import SMALL, check_names, check_prompts
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.raw_json import (
    FALSE,
    NULL,
    Fields,
    NotJson,
    OtherJson,
    decode,
    maybe,
    to_raw,
)
from pdrelay_proxy.errors import BadRequest

# of GENERATE: an object with the fields that other calls have beside the prompt
SAMPLING: Final = "sampling_params"
_EXTRA: Final = "extra_args"
# vLLM merges it into extra_args, where it reads the KV parameters
_XARGS: Final = "vllm_xargs"
CLEANED: Final = frozenset({SAMPLING, _XARGS})  # what ``parse`` may return another value of
# Only the router may set these: from a client they would name memory of other requests, or crash
# the engine.
_PRIVATE: Final = ("kv_transfer_params", "ec_transfer_params")
# "full" makes vLLM 0.32 publish every cached block that a request uses again
# (vllm/v1/core/kv_cache_manager.py): a client could flood all routers that follow the engine's
# events. The answer is the same without it.
_REPORT_MODE: Final = "kv_cache_report_mode"
_NOT_IN_EXTRA: Final = frozenset({*_PRIVATE, _REPORT_MODE})
_TEMPLATE: Final = "chat_template"
_TEMPLATE_KWARGS: Final = "chat_template_kwargs"
TEMPLATES: Final = frozenset({_TEMPLATE, _TEMPLATE_KWARGS})
_NO_NAME: Final = (b"null", b'""')
_RESPONSES: Final = Api.RESPONSES


def parse(body: bytes) -> Fields:
    """Parse a client's body, and refuse the parameters that only the router may set.

    ``kv_cache_report_mode`` is dropped from vLLM's extra arguments.

    Raises:
        BadRequest: the body is not a JSON object, has such parameters, or has too many names or
            prompts.
    """
    is_small = len(body) <= SMALL
    if not is_small:
        check_names(body)
    try:
        if not body.isascii():
            body.decode()  # msgspec decodes no values here, and vLLM would answer in FastAPI's format
        fields = decode(body, Fields)
    except (NotJson, UnicodeDecodeError) as exc:
        fields = _otherwise_encoded(body, exc)
    if not is_small:
        check_prompts(fields, len(body))
    fields = _public(fields, inside="")
    if (extra := fields.get(_XARGS)) is not None:
        fields[_XARGS] = _public_extra(extra, inside=_XARGS)
    if (sampling := fields.get(SAMPLING)) is not None:
        fields[SAMPLING] = _public_sampling(sampling)
    return fields


def _otherwise_encoded(body: bytes, error: NotJson | UnicodeDecodeError) -> Fields:
    """Parse a body in another encoding than UTF-8; raises BadRequest: it is no object in any."""
    text = _in_utf8(body)
    if text is None:
        raise _not_an_object(error) from error
    check_names(text)
    try:
        return decode(text, Fields)
    except NotJson as exc:
        raise _not_an_object(exc) from exc


def _not_an_object(error: NotJson | UnicodeDecodeError) -> BadRequest:
    if isinstance(error, OtherJson):
        return BadRequest("the body is JSON, but not an object")
    return BadRequest(f"the body is not JSON: {error}")


def _in_utf8(body: bytes) -> bytes | None:
    """Return a body in UTF-8, if it is in another encoding that vLLM reads, or has a byte order
    mark; None: it is not.

    vLLM reads it with Python's json.loads, which detects the encoding by the mark, or by the zeros
    of the first characters.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return None
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        return None


def check_wanted_now(api: Api, fields: Fields) -> None:
    """Accept a request whose answer comes on this connection.

    Raises:
        BadRequest: it is to be fetched later from the engine that has it: clients cannot reach a
            certain engine.
    """
    if api is _RESPONSES and fields.get("background", NULL) not in (NULL, FALSE):
        raise BadRequest(
            "background answers cannot be fetched through this router: leave it out",
            param="background",
        )


def check_chat_template(fields: Fields) -> None:
    """Accept a request that uses the engine's own chat template.

    Rendering a template takes as long as its loops run, and meanwhile the engine renders no other
    chat. vLLM refuses both fields without --trust-request-chat-template; 0.30 and 0.31 do not check
    the second one in /v1/responses.

    Raises:
        BadRequest: it has a template.
    """
    is_named = fields.get(_TEMPLATE, NULL) != NULL
    if (
        is_named
        or (maybe(fields.get(_TEMPLATE_KWARGS, NULL), Fields) or {}).get(_TEMPLATE, NULL) != NULL
    ):
        param = _TEMPLATE if is_named else f"{_TEMPLATE_KWARGS}.{_TEMPLATE}"
        raise BadRequest(
            f"{param} must not be part of a request: engines use their own template, unless the "
            f"operator of this "
            "router allows others (trust_request_chat_template)",
            param=param,
        )


def names_no_model(fields: Fields) -> bool:
    """Tell whether a request leaves its model to the engine: for vLLM an empty name is none."""
    return bytes(fields.get("model", NULL)) in _NO_NAME


def _public(fields: Fields, *, inside: str) -> Fields:
    """Drop private parameters that are null; raises BadRequest: one has a value."""
    for name in _PRIVATE:
        if name in fields and fields.pop(name) != NULL:
            message = f"{inside}{name} is set by the router and must not be part of a request"
            raise BadRequest(message, param=f"{inside}{name}")
    return fields


def _public_sampling(raw: msgspec.Raw) -> msgspec.Raw:
    """Clean ``extra_args`` of vLLM's sampling parameters (vllm/sampling_params.py), which has the
    KV parameters, too.
    """
    sampling = maybe(raw, Fields)
    if sampling is None or (extra := sampling.get(_EXTRA)) is None:
        return raw
    public = _public_extra(extra, inside=f"{SAMPLING}.{_EXTRA}")
    return to_raw(sampling | {_EXTRA: public})


def _public_extra(extra: msgspec.Raw, *, inside: str) -> msgspec.Raw:
    try:
        fields = decode(extra, Fields)
    except OtherJson:
        return extra  # not an object: null, or something the engine refuses
    except NotJson as exc:
        raise BadRequest(f"{inside} is not JSON: {exc}", param=inside) from exc
    if fields.keys().isdisjoint(_NOT_IN_EXTRA):
        return extra
    fields.pop(_REPORT_MODE, None)
    return to_raw(_public(fields, inside=f"{inside}."))
