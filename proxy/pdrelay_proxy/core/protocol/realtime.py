"""Sessions of ``/v1/realtime``: what is an offer of one, how they end, and what both sides are told then.

A session is a WebSocket (RFC 6455) that goes through to one decode engine, message by message. vLLM 0.32 transcribes
audio there (vllm/entrypoints/speech_to_text/realtime), and names the model in a message: the router, which has to
choose before it, takes it from the query, as OpenAI's API does.
"""

from enum import auto
from typing import Final
from urllib.parse import parse_qs

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.http.framing import Head
from pdrelay_proxy.errors import BadRequest

REALTIME_PATH: Final = "/v1/realtime"
_TARGET: Final = REALTIME_PATH.encode("ascii")
_QUERY_MOST: Final = 4096  # bytes
_REASON_MOST: Final = 123  # bytes of a close frame's text (RFC 6455, 5.5.1)
EMPTY_MOST: Final = 512  # frames that carry nothing, at once
EMPTY_PER_S: Final = 16.0
FED_MOST: Final = 8 * 1024  # bytes of what has come that are read before the frames in it are counted
TOO_MANY_EMPTY: Final = "too many frames carry nothing"
NORMAL: Final = 1000
GOING_AWAY: Final = 1001
NO_STATUS: Final = 1005
ABNORMAL: Final = 1006
POLICY: Final = 1008
TOO_LARGE: Final = 1009
INTERNAL_ERROR: Final = 1011
RESTART: Final = 1012
_BROKEN: Final = frozenset({1002, 1003, 1007})  # protocol error, not acceptable, no UTF-8
_NEVER_SENT: Final = frozenset({1004, NO_STATUS, ABNORMAL, 1015})  # RFC 6455, 7.4.1


class Side(FastStrEnum):
    """Who is at one end of a session."""

    CLIENT = auto()
    ENGINE = auto()


class SessionOutcome(FastStrEnum):
    """How a session ended, as the metric names it."""

    CLIENT_CLOSED = auto()
    CLIENT_DISCONNECTED = auto()  # without a close frame
    CLIENT_ERROR = auto()  # it sent what is no frame, or no text
    ENGINE_CLOSED = auto()
    ENGINE_FAILED = auto()
    TOO_LARGE = auto()  # a message of the client
    IDLE = auto()
    TIMEOUT = auto()  # it has lasted as long as a session may
    SHUTDOWN = auto()  # of the router
    REFUSED = auto()  # there was no session: it is counted by its status elsewhere, too


class SocketClosed(Exception):
    """One end of a session is closed. ``code``: of the close frame; 1005: it had none, 1006: there was no frame."""

    def __init__(self, side: Side, code: int, reason: str = "") -> None:
        super().__init__(f"the {side} closed the session with {code} {reason}".rstrip())
        self.side = side
        self.code = code
        self.reason = reason


class EmptyFrames:
    """Counts the frames of one side that carry nothing: pings, pongs, empty fragments and messages.

    One costs its sender six bytes, and the router as much time as any other. A side may send some at once, and then a
    few a second, which is more than any library does.
    """

    __slots__ = ("_at", "_left")

    def __init__(self) -> None:
        self._left = float(EMPTY_MOST)
        self._at = 0.0

    def is_flood(self, *, now: float) -> bool:
        """Count one; tell whether it is one too many."""
        self._left = min(float(EMPTY_MOST), self._left + (now - self._at) * EMPTY_PER_S)
        self._at = now
        self._left -= 1.0
        return self._left < 0.0


class SessionEnd:
    """The end of a session: what it is counted as, and what is said to the sides that are still there."""

    __slots__ = ("code", "error", "outcome", "reason")

    def __init__(self, outcome: SessionOutcome, code: int, reason: str = "", *, error: str | None = None) -> None:
        self.outcome = outcome
        self.code = code
        self.reason = short(reason)
        self.error = error  # what went wrong, for the log


def offers_session(head: Head) -> bool:
    """Tell whether a head asks for a session, and for nothing else: only then the connection changes its protocol.

    The path must be written plainly, and no body may follow: all else is served as HTTP/1.1, without an upgrade.
    """
    if head.method != b"GET" or head.is_old or head.length != 0 or head.target.partition(b"?")[0] != _TARGET:
        return False
    if head.shown.get(b"upgrade", b"").lower() != b"websocket":
        return False
    options = [value.lower() for name, value in head.headers if name == b"connection"]
    return b"upgrade" in b",".join(options).replace(b" ", b"").replace(b"\t", b"").split(b",")


def upgrade_head(head: Head) -> bytes:
    """Return the head with the one ``Upgrade`` that is meant; core/http/framing.py has taken out what came."""
    return head.raw[:-2] + b"upgrade: websocket\r\n\r\n"


def model_in(query: bytes) -> str | None:
    """Return the model that a query names; None: it names none.

    Raises:
        BadRequest: it names several, or is no query.
    """
    if len(query) > _QUERY_MOST:
        raise BadRequest(f"the query has more than {_QUERY_MOST} bytes: write ?model=NAME", param="model")
    try:
        found = parse_qs(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError as exc:
        raise BadRequest("the query cannot be read: write ?model=NAME", param="model") from exc
    models = found.get("model", [])
    if len(models) > 1:
        raise BadRequest(f"the query names {len(models)} models: write ?model=NAME once", param="model")
    return models[0] if models and models[0] else None


def ended_by(closed: SocketClosed) -> SessionEnd:
    """Say what the end of one side means for the session."""
    code, reason = closed.code, closed.reason
    if closed.side is Side.ENGINE:
        if code in (NORMAL, GOING_AWAY) or 3000 <= code < 5000:
            return SessionEnd(SessionOutcome.ENGINE_CLOSED, code, reason)
        said = "the engine has failed" if code == ABNORMAL else f"the engine has closed the session ({code})"
        return SessionEnd(SessionOutcome.ENGINE_FAILED, INTERNAL_ERROR, said, error=said)
    if code == RESTART:  # the server's own, when it ends
        return SessionEnd(SessionOutcome.SHUTDOWN, GOING_AWAY, "the router ends", error="the router had to end")
    if code == TOO_LARGE:
        return SessionEnd(SessionOutcome.TOO_LARGE, GOING_AWAY)
    if code in _BROKEN:
        return SessionEnd(SessionOutcome.CLIENT_ERROR, GOING_AWAY)
    if code in (NO_STATUS, ABNORMAL):
        return SessionEnd(SessionOutcome.CLIENT_DISCONNECTED, GOING_AWAY)
    return SessionEnd(SessionOutcome.CLIENT_CLOSED, sendable(code), reason)


def idle(seconds: float) -> SessionEnd:
    """End a session in which nothing was said for so long."""
    return SessionEnd(SessionOutcome.IDLE, POLICY, f"no message came through for {seconds:g} s")


def overdue(seconds: float) -> SessionEnd:
    """End a session that has lasted as long as it may."""
    return SessionEnd(SessionOutcome.TIMEOUT, POLICY, f"a session may last {seconds:g} s")


def sendable(code: int) -> int:
    """Return a code that a close frame may have."""
    return NORMAL if code in _NEVER_SENT or not 1000 <= code < 5000 or 1016 <= code < 3000 else code


def short(reason: str) -> str:
    """Return as much of a reason as a close frame has room for."""
    return reason.encode("utf-8", "replace")[:_REASON_MOST].decode("utf-8", "ignore")
