"""The way into every route that wants the operator's key: the key, then the size of the body, then FastAPI.

FastAPI reads a body of any size before it looks at dependencies. Here an unknown caller has nothing read, and a known
one no more than the route takes. Each call ends in a line of the audit log.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from xpyd_proxy.api.admin_key import require_admin_key
from xpyd_proxy.api.audit import Audit, AuditedAction
from xpyd_proxy.api.request_body import read_body, require_json
from xpyd_proxy.api.schemas import OperatorError
from xpyd_proxy.core.http.json_bounds import check_names
from xpyd_proxy.core.raw_json import Fields, NotJson, decode
from xpyd_proxy.errors import BadRequest, BodyTooLarge, UnsupportedMedia

OPERATORS: Final = "operators"  # the tag of routes that are shown to who has the operator's key
SMALL_BODY: Final = 64 * 1024  # bytes: the name of an engine
_RAW: Final = "body"  # of a request to explain: it is repeated as it came
_SHOWN: Final = 100  # characters of what a caller has written
_JSON: Final = (b"content-type", b"application/json")
_STATUSES: Final[dict[int | str, str]] = {
    400: "The body is not what the route takes, or it cannot be done",
    401: "No admin key, or a wrong one",
    403: "No engine may be added there",
    404: "There is no such engine, or the router has no admin key",
    409: "The engine is managed elsewhere",
    413: "The body is larger than the route takes",
    415: "The body is of another type",
    503: "The store did not answer: the change may or may not have been made",
    "default": "What is wrong, in one sentence",
}
OPERATOR_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": OperatorError, "description": text} for status, text in _STATUSES.items()
}


def _worded(field: str, fault: str) -> str:
    return f"The body is not what this route takes: {field + ': ' if field else ''}{fault}"


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """Who may call the routes, and what is written about it."""

    admin_key: str | None
    audit: Audit

    def route(
        self, *, body_most: int, sentence: Callable[[str, str], str] = _worded, any_media: bool = False
    ) -> type[APIRoute]:
        """Return the class of routes whose bodies have at most so many bytes.

        ``sentence`` words a body that is wrong, from the field (empty: the whole body) and the fault. ``any_media``: a
        body may be declared as anything.
        """
        authenticate, audit = require_admin_key(self.admin_key, self.audit), self.audit

        class OperatorRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                serve, takes_body = super().get_route_handler(), self.body_field is not None

                async def handler(request: Request) -> Response:
                    authenticate(request)
                    with audit.act(request) as action:
                        request.state.action = action
                        if not takes_body:
                            return await serve(request)
                        body = await _read(request, body_most, any_media=any_media)
                        try:
                            return await serve(_JsonRequest(request, _parsed(body)))
                        except (NotJson, BadRequest) as exc:
                            raise HTTPException(400, sentence("", str(exc))) from exc
                        except RequestValidationError as exc:
                            first = exc.errors()[0]
                            place = ".".join(map(str, first["loc"][1:]))[:_SHOWN]
                            shown = "".join(letter if letter.isprintable() else "?" for letter in place)
                            raise HTTPException(400, sentence(shown, str(first["msg"]))) from exc

                return handler

        return OperatorRoute


class _JsonRequest(Request):
    """A request whose body has been read already, whatever it is declared as."""

    def __init__(self, request: Request, fields: Mapping[str, object]) -> None:
        headers = [header for header in request.scope["headers"] if header[0] != _JSON[0]]
        super().__init__({**request.scope, "headers": [*headers, _JSON]}, request.receive)
        self._fields = fields

    async def body(self) -> bytes:
        """Return something: FastAPI asks for the bytes before it asks for what they say."""
        return b"{}"

    async def json(self) -> Any:  # noqa: ANN401 (as in Starlette)
        """Return the fields."""
        return self._fields


def action_of(request: Request) -> AuditedAction:
    """Return what the audit log will say of a request."""
    action: AuditedAction = request.state.action
    return action


async def _read(request: Request, most: int, *, any_media: bool) -> bytes:
    try:
        if not any_media:
            require_json(request.scope)
        return await read_body(request.scope, request.receive, limit=most)
    except UnsupportedMedia as exc:
        raise HTTPException(415, str(exc)) from exc
    except BodyTooLarge as exc:
        raise HTTPException(413, str(exc)) from exc


def _parsed(body: bytes) -> Mapping[str, object]:
    """Read an object, but one value; raises NotJson, or BadRequest: it has too many names, or a long value."""
    check_names(body)
    found: dict[str, object] = {**decode(body, Fields)}
    for name, raw in decode(body, Fields).items():
        if name != _RAW:
            if len(memoryview(raw)) > SMALL_BODY:
                raise BadRequest(f"{name[:_SHOWN]} has more than {SMALL_BODY} bytes")
            found[name] = decode(raw, object)
    return found
