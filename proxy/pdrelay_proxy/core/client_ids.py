"""How clients name their requests."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

_CLIENT_ID: Final = re.compile(rb"[!-~]{1,128}")


class ClientIds:
    """The headers in which a client may name its request."""

    __slots__ = ("_first", "_others")

    def __init__(self, names: Sequence[str] = ()) -> None:
        """``names``: the first one that a request has counts; empty: X-Request-Id."""
        self._first, *self._others = [name.lower().encode() for name in names] or [b"x-request-id"]

    def client_id_in(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the client's id of a request; None: it has none."""
        header = headers.get(self._first)
        for name in self._others:
            if header is None:
                header = headers.get(name)
        return None if header is None else client_id(header)


def client_id(header: bytes) -> str | None:
    """Return the id in a client's X-Request-Id; None: it is too long or odd."""
    return header.decode("ascii") if _CLIENT_ID.fullmatch(header) else None
