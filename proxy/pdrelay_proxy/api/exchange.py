"""What answers a request, as the request's connection sees it."""

from typing import Protocol

from pdrelay_proxy.errors import ProxyError


class Exchange(Protocol):
    """A request and its answer (requests/request.py, api/asgi_exchange.py)."""

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open behind it."""
        ...

    @keep_alive.setter
    def keep_alive(self, value: bool, /) -> None: ...

    @property
    def response_started(self) -> bool:
        """Whether some of the answer was written."""
        ...

    @property
    def response_complete(self) -> bool:
        """Whether all of the answer was written."""
        ...

    def receive_body(self, piece: bytes, /, *, is_all: bool = False) -> None:
        """Take a piece of the body; ``is_all``: it is the whole body."""
        ...

    def serve(self, body: bytes = b"", /) -> None:
        """Serve the request: it is complete; ``body``: the whole body, if no piece came before."""
        ...

    def pause(self) -> None:
        """Write no more for now: the client is slow."""
        ...

    def resume(self) -> None:
        """Write on."""
        ...

    def leave(self, refusal: ProxyError | None = None) -> None:
        """Give it up: the client does not read the answer; ``refusal``: what it gets instead, from
        its connection.
        """
        ...
