"""Everything the router raises on purpose: the tree says who is at fault.

* :exc:`ProxyError`
    * :exc:`ClientError` -- the client
        * :exc:`BadRequest` -- the body is not something we can split or pass on
            * :exc:`BadFraming` -- what came is no request, or readers could disagree about where it ends
        * :exc:`HeadTooLarge` -- the head, or the trailers, are longer than we accept
        * :exc:`UriTooLong` -- the request line is
        * :exc:`NotServed` -- the method is one that no path here has
        * :exc:`TooSlow` -- the request was not complete in time
        * :exc:`BodyTooLarge` -- the body is longer than we accept
        * :exc:`UnsupportedMedia` -- the body is not declared as JSON
        * :exc:`Misdirected` -- the router has no such name
        * :exc:`CrossSite` -- a browser, on behalf of another web site
        * :exc:`UnknownModel` -- no engine serves the model that is asked for
    * :exc:`Refused` -- the client, says an engine, in words that reach the client unchanged
    * :exc:`Unauthorized` -- the client: it has no key, or a wrong one
    * :exc:`TurnedAway` -- there is more to do than may be done at once
        * :exc:`KeyOverLimit` -- the client: its key sends more than it may
        * :exc:`RouterFull` -- nobody: all clients together send more than the router takes
        * :exc:`TooManyConnections` -- nobody, or the client: it, or all together, have too many connections
        * :exc:`ClosingDown` -- nobody: the router is about to end
    * :exc:`OutOfTime` -- nobody: the request as a whole has taken longer than the operator wants
    * :exc:`NoInstance` -- nobody: there is no engine to send the request to (yet)
    * :exc:`EngineError` -- an engine: unreachable, broken, or not making sense
        * :exc:`EngineTimeout` -- an engine: too slow
        * :exc:`EngineFault` -- an engine: it lives, and failed this request
        * :exc:`EngineBusy` -- an engine: it has no room now
        * :exc:`Moved` -- a prefill engine: it is not the one that the decode engine was told of
    * :exc:`AddressError` -- the operator: no engine can have this address
        * :exc:`BadPort` -- the operator: the port is a number, but not a TCP port
        * :exc:`NotAllowed` -- the operator: no engine may be added there
    * :exc:`AlreadyKnown` -- the operator: the engine is there already
    * :exc:`UnknownInstance` -- the operator: there is no engine of this name
    * :exc:`ConfigError` -- the operator: a file says something that cannot be

Messages name instances by id and never by address, because clients read them.
"""


class ProxyError(Exception):
    """Base class of every error the router raises."""


class ClientError(ProxyError):
    """The client sent something it should not send."""


class BadRequest(ClientError):
    """The body is wrong; ``param`` names the field at fault, if it is one field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadFraming(BadRequest):
    """The bytes are no request that everybody would understand in the same way."""


class HeadTooLarge(ClientError):
    """The head, or the trailers, have more bytes or lines than the router accepts."""


class UriTooLong(ClientError):
    """The request line has more bytes than the router accepts."""


class NotServed(ClientError):
    """The method is none that a router has a use for."""


class TooSlow(ClientError):
    """The request was not complete in the time that it had."""


class BodyTooLarge(ClientError):
    """The body has more bytes than the router accepts."""


class UnsupportedMedia(ClientError):
    """The body is declared as something other than JSON."""


class Misdirected(ClientError):
    """The Host of a request is a name that this router does not have."""


class CrossSite(ClientError):
    """A page of another web site has sent a request to a router that wants no keys."""


class UnknownModel(ClientError):
    """No engine serves this model; the message names those that are served."""


class Refused(ProxyError):
    """An engine refused the request before any token; the client gets its words unchanged."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"an engine refused the request with status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class Unauthorized(ProxyError):
    """The client has shown no key, or one that is not known here; ``asks`` is what ``WWW-Authenticate`` says."""

    def __init__(self, message: str, *, asks: str = "Bearer") -> None:
        super().__init__(message)
        self.asks = asks


class TurnedAway(ProxyError):
    """The request was not let in; after ``retry_after_s`` seconds it is worth another try."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyOverLimit(TurnedAway):
    """The client's key is over one of its limits."""


class RouterFull(TurnedAway):
    """The router is over one of its limits, whoever asks."""


class TooManyConnections(TurnedAway):
    """The router has as many connections as it may, of all clients or of this one."""


class ClosingDown(TurnedAway):
    """The router takes no new requests: it ends when those it has are finished."""


class OutOfTime(ProxyError):
    """The request was not done in the time that a request may take; no single engine is to blame."""


class NoInstance(ProxyError):
    """No engine of the needed role is known."""


class EngineError(ProxyError):
    """An engine cannot be reached, failed, or answered with something we do not understand.

    ``reached`` is False when not a byte of the request can have arrived there.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class EngineTimeout(EngineError):
    """An engine did not answer in time."""


class EngineFault(EngineError):
    """An engine has answered with an error status: it, or the request, is at fault."""


class EngineBusy(EngineError):
    """An engine takes no more requests for now."""


class Moved(EngineError):
    """A prefill engine has restarted (or is several) since its coordinates were learned."""


class AddressError(ProxyError):
    """The text is not the address of an engine."""


class BadPort(AddressError):
    """The port is a number, but outside 1..65535."""


class NotAllowed(AddressError):
    """No engine may be added there: it is not in ``allowed_instances``."""


class AlreadyKnown(ProxyError):
    """An engine with this role and address is already in the set."""


class UnknownInstance(ProxyError):
    """No engine has this id (any more)."""


class ConfigError(ProxyError):
    """A file of the operator cannot be read, or says something that cannot be; the message names the place."""
