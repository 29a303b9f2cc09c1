"""Everything the router raises on purpose: the tree says who is at fault.

* :exc:`ProxyError`
    * :exc:`ClientError` -- the client
        * :exc:`BadRequest` -- the body can be neither split nor passed on
            * :exc:`BadFraming` -- it is not an HTTP request, or parsers could disagree about its
              end
        * :exc:`HeadTooLarge` -- the head, or the trailers, have more bytes or lines than we accept
        * :exc:`UriTooLong` -- the request line has more bytes than we accept
        * :exc:`NotServed` -- no path has this method
        * :exc:`TooSlow` -- the request was not complete in time
        * :exc:`BodyTooLarge` -- the body is longer than we accept
        * :exc:`UnsupportedMedia` -- the body is not declared as JSON
            * :exc:`UnsupportedCoding` -- the body is compressed in a way that is not supported
        * :exc:`Misdirected` -- the router has no such name
        * :exc:`CrossSite` -- a browser, on behalf of another web site, to a router that wants no
          keys
        * :exc:`PathNotServed` -- no engine that serves the model has this path
        * :exc:`UnknownModel` -- no engine serves the requested model; the message names the
          served ones
    * :exc:`Refused` -- the client, by the error of an engine, which reaches the client
        * :exc:`NoSuchPath` -- the client: the engine has no such path
    * :exc:`Unauthorized` -- the client: it has no key, or a wrong one
    * :exc:`TurnedAway` -- more requests than the limits allow
        * :exc:`KeyOverLimit` -- the client: its key sends more than it may
        * :exc:`RouterFull` -- no fault: all clients together send more than the router takes
        * :exc:`TooManyConnections` -- no fault, or the client: it, or all together, have too many
          connections
        * :exc:`ClosingDown` -- no fault: the router takes no new requests, and ends when those it
          has are finished
    * :exc:`OutOfTime` -- no fault: the request as a whole has taken longer than the operator wants
    * :exc:`NoInstance` -- no fault: there is no engine to send the request to (yet)
    * :exc:`EngineError` -- an engine: unreachable, broken, or not making sense
        * :exc:`EngineTimeout` -- an engine: it did not answer in time
        * :exc:`EngineFault` -- an engine: it lives, and failed this request
        * :exc:`EngineBusy` -- an engine: it has no room now
        * :exc:`NoKvParams` -- no fault: a prefill engine keeps no KV of a request, for it keeps as
          much as it may
        * :exc:`KeyRefused` -- the operator: an engine does not accept the router's key
        * :exc:`AnswerRefused` -- no fault: the answer is above a limit of the router, or its filter
          cannot clean it
        * :exc:`ConnectionStale` -- no fault: an idle connection was closed as a request was written
          to it
        * :exc:`RouterLacks` -- the router: it has no descriptor, port or memory for a connection
        * :exc:`NetworkFault` -- the network: an engine's name does not resolve, or there is no way
          to it
        * :exc:`Moved` -- a prefill engine: it is not the one that the decode leg named
    * :exc:`AddressError` -- the operator: no engine can have this address
        * :exc:`BadPort` -- the operator: the port is a number, but outside 1..65535
        * :exc:`NotAllowed` -- the operator: no engine may be added there, by ``allowed_instances``
    * :exc:`NotAccepted` -- an engine that was to be added: it cannot be reached, or serves nothing
      or another model
    * :exc:`AlreadyKnown` -- the operator: an engine with this role and address is there already
    * :exc:`UnknownInstance` -- the operator: no engine has this id (any more)
    * :exc:`CannotTurn` -- the operator: an engine cannot serve this role, or is the last one of
      another
    * :exc:`ConfigError` -- the operator: a file cannot be read, or is invalid; the message names
      the place

Messages name instances by id and never by address, because clients read them.
"""

from collections.abc import Iterator
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class ProxyError(Exception): ...


class ClientError(ProxyError): ...


class BadRequest(ClientError):
    """The body is wrong; ``param`` names the wrong field, if it is one field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadFraming(BadRequest): ...


class HeadTooLarge(ClientError): ...


class UriTooLong(ClientError): ...


class NotServed(ClientError): ...


class TooSlow(ClientError): ...


class BodyTooLarge(ClientError): ...


class UnsupportedMedia(ClientError): ...


class UnsupportedCoding(UnsupportedMedia): ...


class Misdirected(ClientError): ...


class CrossSite(ClientError): ...


class PathNotServed(ClientError): ...


class UnknownModel(ClientError): ...


class Refused(ProxyError):
    """An engine refused the request before any token; the client gets its error."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"an engine refused the request with status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class NoSuchPath(Refused):
    """404 or 405."""


class Unauthorized(ProxyError):
    """The client has no key, or an unknown one; ``asks`` is the value of ``WWW-Authenticate``."""

    def __init__(self, message: str, *, asks: str = "Bearer") -> None:
        super().__init__(message)
        self.asks = asks


class TurnedAway(ProxyError):
    """The request was refused; it is worth another try after ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyOverLimit(TurnedAway): ...


class RouterFull(TurnedAway): ...


class TooManyConnections(TurnedAway): ...


class ClosingDown(TurnedAway): ...


class OutOfTime(ProxyError): ...


class NoInstance(ProxyError):
    """An engine may be there after ``retry_after_s`` seconds; None: unknown."""

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoMatchingInstance(NoInstance):
    """There are prefill and decode engines, but no two of them can share a request."""


class EngineError(ProxyError):
    """An engine cannot be reached, failed, or gave an answer that cannot be understood.

    ``reached`` is False if no byte of the request can have arrived there.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class EngineTimeout(EngineError): ...


class EngineFault(EngineError): ...


class EngineBusy(EngineError): ...


class NoKvParams(EngineError): ...


class NoModelName(EngineError): ...


class KeyRefused(EngineError): ...


class AnswerRefused(EngineError): ...


class ConnectionStale(EngineError):
    """The engine has closed a reused connection; not ``was_sent``: it had not the whole request."""

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class RouterLacks(EngineError):
    """No byte of the request has left the router."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reached=False)


class NetworkFault(EngineError):
    """No byte of the request has arrived."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reached=False)


class Moved(EngineError): ...


class AddressError(ProxyError): ...


class BadPort(AddressError): ...


class NotAllowed(AddressError): ...


class NotAccepted(ProxyError): ...


class AlreadyKnown(ProxyError): ...


class UnknownInstance(ProxyError): ...


class CannotTurn(ProxyError): ...


class ConfigError(ProxyError): ...


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that led to it: libraries hide them behind errors of theirs.

    Each comes once: an error that is raised from one that it led to leads back to itself.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def forget_frames(error: E) -> E:
    """Have an error, and those that led to it, no longer refer to the frames they passed; return
    it.

    Frames refer to their callers' (CPython 3.13), these to the request, and that to its error: a
    reference cycle, which would keep the request until the garbage collector comes. Whoever keeps
    an error calls this.
    """
    for each in causes(error):
        each.with_traceback(None)
    return error
