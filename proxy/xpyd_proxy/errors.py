"""Everything the router raises on purpose: the tree says who is at fault.

* :exc:`ProxyError`
    * :exc:`ClientError` -- the client
        * :exc:`BadRequest` -- the body is not something we can split or pass on
        * :exc:`BodyTooLarge` -- the body is longer than we accept
        * :exc:`UnsupportedMedia` -- the body is not declared as JSON
    * :exc:`Refused` -- the client, says an engine, in words that reach the client unchanged
    * :exc:`NoInstance` -- nobody: there is no engine to send the request to (yet)
    * :exc:`EngineError` -- an engine: unreachable, broken, or not making sense
        * :exc:`EngineTimeout` -- an engine: too slow
        * :exc:`Moved` -- a prefill engine: it is not the one that the decode engine was told of
    * :exc:`AddressError` -- the operator: no engine can have this address
        * :exc:`BadPort` -- the operator: the port is a number, but not a TCP port
    * :exc:`AlreadyKnown` -- the operator: the engine is there already

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


class BodyTooLarge(ClientError):
    """The body has more bytes than the router accepts."""


class UnsupportedMedia(ClientError):
    """The body is declared as something other than JSON."""


class Refused(ProxyError):
    """An engine refused the request before any token; the client gets its words unchanged."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"an engine refused the request with status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


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


class Moved(EngineError):
    """A prefill engine has restarted (or is several) since its coordinates were learned."""


class AddressError(ProxyError):
    """The text is not the address of an engine."""


class BadPort(AddressError):
    """The port is a number, but outside 1..65535."""


class AlreadyKnown(ProxyError):
    """An engine with this role and address is already in the set."""
