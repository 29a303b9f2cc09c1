"""The bodies of operators' requests: read within bounds, and parsed before FastAPI sees them."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import HTTPException, Request

from pdrelay_proxy.core.http.bounded_body import read_bounded
from pdrelay_proxy.core.http.content_codings import coding_of
from pdrelay_proxy.core.http.json_bounds import check_names
from pdrelay_proxy.core.raw_json import Fields, decode
from pdrelay_proxy.errors import BadRequest, BodyTooLarge, UnsupportedCoding, UnsupportedMedia
from pdrelay_proxy.requests.intake import check_json, check_length, too_long

SMALL_BODY: Final = 64 * 1024  # bytes: the name of an engine
_RAW: Final = "body"  # of a request to explain: it stays as it came
_JSON: Final = (b"content-type", b"application/json")
_NAME_SHOWN: Final = 100  # characters of a field's name in an error


async def read_body(request: Request, *, limit: int) -> bytes:
    """Read at most ``limit`` bytes; raises BodyTooLarge, or ClientDisconnect: the client hung up
    before the end.
    """
    check_length(request.headers.get("content-length", "").encode("latin-1"), limit)
    return await read_bounded(request.stream(), limit, too_long(limit))


class JsonRequest(Request):
    """A request whose body has been parsed already, whatever its content type."""

    def __init__(self, request: Request, fields: Mapping[str, object]) -> None:
        headers = [header for header in request.scope["headers"] if header[0] != _JSON[0]]
        super().__init__({**request.scope, "headers": [*headers, _JSON]}, request.receive)
        self._fields = fields

    async def body(self) -> bytes:
        """Return a placeholder: FastAPI calls this before ``json``."""
        return b"{}"

    async def json(self) -> Any:  # noqa: ANN401 (as in Starlette)
        """Return the fields."""
        return self._fields


async def read_checked(request: Request, most: int, *, any_media: bool) -> bytes:
    """Read a body of so many bytes at most; raises HTTPException."""
    try:
        if not any_media:
            check_json(request.headers.get("content-type", "").encode("latin-1"))
        if coding_of(request.headers.get("content-encoding", "").encode("latin-1")) is not None:
            raise UnsupportedCoding("routes for operators take no compressed bodies")
        return await read_body(request, limit=most)
    except UnsupportedMedia as exc:
        headers = {"accept-encoding": "identity"} if isinstance(exc, UnsupportedCoding) else None
        raise HTTPException(415, str(exc), headers) from exc
    except BodyTooLarge as exc:
        raise HTTPException(413, str(exc)) from exc


def parsed(body: bytes) -> Mapping[str, object]:
    """Parse an object, except the value of ``body``; raises NotJson, or BadRequest: it has too many
    names, or a long value.
    """
    check_names(body)
    fields = decode(body, Fields)
    values: dict[str, object] = {**fields}
    for name, raw in fields.items():
        if name != _RAW:
            if len(memoryview(raw)) > SMALL_BODY:
                raise BadRequest(f"{name[:_NAME_SHOWN]} has more than {SMALL_BODY} bytes")
            values[name] = decode(raw, object)
    return values
