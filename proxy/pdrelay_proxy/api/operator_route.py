"""The class of routes that need the operator's key: checks the key, then the size of the body, then
calls FastAPI.

FastAPI reads a body of any size before it checks dependencies. Here nothing is read from an unknown
caller, and from a known one no more than the route accepts. Each call ends in a line of the audit
log.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fastapi import HTTPException, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader

from pdrelay_proxy.api.audit import Audit
from pdrelay_proxy.api.error_answers import Answers, error_answers
from pdrelay_proxy.api.operator_bodies import SMALL_BODY, JsonRequest, parsed, read_checked
from pdrelay_proxy.api.schemas import OperatorError
from pdrelay_proxy.core.admission.admin_key import AdminKey, fingerprint
from pdrelay_proxy.core.raw_json import NotJson
from pdrelay_proxy.errors import BadRequest
from pdrelay_proxy.io.discovery.store import StoreDown, StoreNotWritten

OPERATORS: Final = "operators"  # the tag of routes that need the operator's key in the document
_SHOWN: Final = 100  # characters of a caller's text
_STATUSES: Final[Mapping[int | str, str]] = {
    400: "The request is not what the route takes, or it cannot be done",
    401: "No admin key, or a wrong one",
    403: "This is not for the join key, or no engine may be added there",
    404: "There is no such engine or request, or the router has no admin key",
    409: "The engine is managed elsewhere, cannot serve the role, or its streams cannot move",
    413: "The body is larger than the route takes",
    415: "The body is of another type",
    503: "The store has not acknowledged the change: whether it was made is said, if it is known",
    "default": "What is wrong, in one sentence",
}
_ALWAYS: Final[tuple[int | str, ...]] = (401, 403, 404, "default")
_KEY_HEADERS: Final = {"www-authenticate": "X-Api-Key"}
_MISSING: Final = "This is for operators: send the router's admin key as X-Api-Key."
_UNCONFIGURED: Final = (
    "This router has no admin key, so nobody may do this: start it with --admin-key-file or "
    "ADMIN_API_KEY."
)
_NOT_FOR_ENGINES: Final = (
    "The join key may list, add, drain, undrain and remove engines at its own address: no more."
)
_BEHIND_PROXY: Final = (
    "The join key is for the caller's own address, which the router cannot see behind a proxy: ask "
    "the router itself."
)
_PROXIED: Final = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)
# For the document; routes check the key before FastAPI reads a body.
OPERATOR_KEY: Final[Any] = Security(
    APIKeyHeader(
        name="X-Api-Key", scheme_name="operator", description="The operator's key", auto_error=False
    )
)


def operator_errors(*statuses: int) -> Answers:
    """Describe the errors of a route for operators: these, and those of all such routes."""
    return error_answers(
        OperatorError, {status: _STATUSES[status] for status in (*statuses, *_ALWAYS)}
    )


BODY_ERRORS: Final = operator_errors(400, 413, 415)  # of a route that takes a body
CHANGE_ERRORS: Final = operator_errors(400, 409, 413, 415, 503)  # of one that changes engines


def _worded(field: str, fault: str) -> str:
    return f"The body is not what this route takes: {field + ': ' if field else ''}{fault}"


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """Who may call the routes, and the audit of the calls."""

    admin_key: AdminKey
    join_key: AdminKey
    audit: Audit
    max_body_bytes: int

    def authenticate(self, request: Request, *, takes_join_key: bool = False) -> None:
        """Accept callers with the key; keys are compared in constant time.

        ``takes_join_key``: also those with the join key, for the engines of their own address
        (``own_engines.joining_host``).
        """
        header = request.headers.get("x-api-key")
        if not self.admin_key.exists and not (takes_join_key and self.join_key.exists):
            self.audit.refused(request, "the router has no admin key")
            raise HTTPException(404, _UNCONFIGURED)
        if header is None:
            self.audit.refused(request, "no X-Api-Key")
            raise HTTPException(401, _MISSING, _KEY_HEADERS)
        key = header.encode("latin-1")
        joins = self.join_key.matches(key)
        if self.admin_key.matches(key):
            request.state.admin = fingerprint(key)
            request.state.joining_host = None
            return
        if not joins:
            self.audit.refused(request, "a wrong X-Api-Key")
            # the text of vLLM's demo, which answers 403
            raise HTTPException(401, "Forbidden: Invalid API Key.", _KEY_HEADERS)
        request.state.admin = f"join:{fingerprint(key)}"
        if not takes_join_key:
            self.audit.refused(request, "the join key, which is not for this")
            raise HTTPException(403, _NOT_FOR_ENGINES)
        # Otherwise the address would be the proxy's, or, if uvicorn trusts it, the header's.
        if request.client is None or not _PROXIED.isdisjoint(request.headers.keys()):
            self.audit.refused(request, "the join key, behind a proxy")
            raise HTTPException(403, _BEHIND_PROXY)
        request.state.joining_host = request.client.host

    async def require(self, request: Request) -> None:
        """Authenticate, as a dependency of a route without a body."""
        self.authenticate(request)

    def route(
        self,
        *,
        is_large: bool = False,
        sentence: Callable[[str, str], str] = _worded,
        any_media: bool = False,
        takes_join_key: bool = False,
    ) -> type[APIRoute]:
        """Return the class of routes whose bodies name an engine, or are as large as a client's
        (``is_large``).

        ``sentence``: builds the error for a wrong body from the field (empty: the whole body) and
        the fault. ``any_media``: accept any content type. ``takes_join_key``: as in
        ``authenticate``.
        """
        authenticate = partial(self.authenticate, takes_join_key=takes_join_key)
        audit = self.audit
        body_most = self.max_body_bytes if is_large else min(SMALL_BODY, self.max_body_bytes)

        class OperatorRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                serve = super().get_route_handler()
                takes_body = self.body_field is not None

                async def handler(request: Request) -> Response:
                    authenticate(request)
                    with audit.act(request):
                        if not takes_body:
                            return await _serve_plain(serve, request)
                        body = await read_checked(request, body_most, any_media=any_media)
                        try:
                            return await serve(JsonRequest(request, parsed(body)))
                        except (NotJson, BadRequest) as exc:
                            raise HTTPException(400, sentence("", str(exc))) from exc
                        except RequestValidationError as exc:
                            raise HTTPException(400, sentence(*_first_fault(exc))) from exc

                return handler

        return OperatorRoute


async def _serve_plain(
    serve: Callable[[Request], Coroutine[Any, Any, Response]], request: Request
) -> Response:
    """Serve a request without a body; a wrong path or query is answered in one sentence."""
    try:
        return await serve(request)
    except RequestValidationError as exc:
        field, fault = _first_fault(exc)
        raise HTTPException(400, f"{field}: {fault}") from exc


def _first_fault(error: RequestValidationError) -> tuple[str, str]:
    """Return the first wrong field, and why it is wrong."""
    fault = error.errors()[0]
    field = ".".join(map(str, fault["loc"][1:]))[:_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in field), str(fault["msg"])


def not_stored(what: str, verb: str, error: StoreDown) -> HTTPException:
    """Return the answer to a change that the store has not acknowledged."""
    is_known = isinstance(error, StoreNotWritten)
    fate = f"was not {verb}" if is_known else f"may or may not have been {verb}"
    return HTTPException(503, f"{what} {fate}: {error}")


def is_admin(request: Request, admin_key: AdminKey) -> bool:
    """Return whether a request has the operator's key."""
    return admin_key.matches(request.headers.get("x-api-key", "").encode("latin-1"))
