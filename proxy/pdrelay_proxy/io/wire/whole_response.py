"""Whole answers that the router itself reads: lists of models, repeated requests, requests to free
blocks.
"""

import asyncio
from typing import Final

from pdrelay_proxy.core.model import EngineResponse
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.wire.response_handler import ResponseHandler

# Bytes: it is charged to no request. A list of 2,000 adapters has 500 KB.
READ_MOST: Final = 4 * 1024 * 1024


class WholeAnswer(ResponseHandler):
    """``answer`` is done when the response is complete; it raises EngineError."""

    __slots__ = ("_load", "_pieces", "_size", "_status", "_type", "answer")

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.answer: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        self._pieces: list[bytes] = []
        self._size = 0
        self._status = 0
        self._type = b""
        self._load = b""

    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        """Keep the head."""
        self._status = status
        self._type = content_type
        self._load = load

    def arrived(self, piece: bytes, *, last: bool = False) -> None:  # noqa: ARG002 (``end`` follows)
        """Keep a piece of the body."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > READ_MOST:
            self.give_up(EngineError(f"{self.engine} answered with more than {READ_MOST} bytes"))

    def end(self) -> None:
        """Complete ``answer``."""
        if not self.answer.done():
            body = b"".join(self._pieces)
            self.answer.set_result(
                EngineResponse(self._status, self._type.decode("latin-1"), body, self._load)
            )

    def fail(self, error: EngineError) -> None:
        """Fail ``answer``."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def crashed(self, bug: Exception) -> None:
        """Fail ``answer`` with a bug of the router."""
        if not self.answer.done():
            self.answer.set_exception(bug)
