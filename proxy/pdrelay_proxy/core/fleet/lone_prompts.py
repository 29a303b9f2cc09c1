"""Prompts that one decode engine computes alone now: its streams wait for them."""

from typing import Final

from pdrelay_proxy.core.model import RequestId

# for so long one counts whose first token is not seen: its answer is no stream
COUNTED_S: Final = 1.0


class LonePrompts:
    """New bytes of prompts, from the sending of a leg to its first token. Times only rise."""

    __slots__ = ("_by_request", "_size")

    def __init__(self) -> None:
        self._size = 0  # of all of them
        # and when it was sent; the oldest first
        self._by_request: dict[RequestId, tuple[int, float]] = {}

    def enter(self, request: RequestId, new: int, now: float) -> None:
        """A leg is sent, of whose prompt the engine lacks so many bytes."""
        self.leave(request)
        self._by_request[request] = new, now
        self._size += new

    def leave(self, request: RequestId) -> None:
        """A leg has its first token, or is over."""
        prompt = self._by_request.pop(request, None)
        if prompt is not None:
            self._size -= prompt[0]

    def size(self, now: float) -> int:
        """Return the bytes of all that are computed."""
        while self._by_request:
            request, (_, at) = next(iter(self._by_request.items()))
            if now < at + COUNTED_S:
                break
            self.leave(request)
        return self._size
