"""The audit log: each action of operators, and each refused one, is a line of the log
``pdrelay.audit``, and is counted.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Final

from fastapi import HTTPException, Request

from pdrelay_proxy.io.logs import note

LOG: Final = logging.getLogger("pdrelay.audit")  # the name by which operators filter
LOG.setLevel(logging.INFO)  # whatever log_level is set to
_ACTIONS: Final = frozenset({"list", "add", "remove", "drain", "undrain", "turn", "explain"})
# they change nothing: logged only if refused
_READS: Final = frozenset({"list", "explain"})
_TEXT_MOST: Final = 300  # characters of a value
_LINES: Final = 10  # about callers without the key, in ``_SPAN_S`` seconds; more are only counted
_SPAN_S: Final = 10.0


class AuditResult(StrEnum):
    """The result of an action."""

    OK = auto()
    REFUSED = auto()  # the operator's request was not possible
    FAILED = auto()  # the store, or the router
    # no admin key, a wrong one, the join key beyond its rights, or a router without a key
    UNAUTHENTICATED = auto()


@dataclass(slots=True)
class Audit:
    """Writes the lines. ``count`` gets each action and its result."""

    count: Callable[[str, str], None]
    clock: Callable[[], float]  # seconds; only differences count
    _since: float = field(default=0.0, init=False)
    _lines_written: int = field(default=0, init=False)
    _dropped: int = field(default=0, init=False)

    @contextmanager
    def act(self, request: Request) -> Generator[None]:
        """Write the line of an action at its end; an HTTPException means that it failed or was
        refused.

        A route sets ``request.state.target`` to the object of the action, as soon as that is known.
        """
        try:
            yield
        except HTTPException as exc:
            result = AuditResult.FAILED if exc.status_code >= 500 else AuditResult.REFUSED
            self._note(request, result, str(exc.detail))
            raise
        except BaseException as exc:
            self._note(request, AuditResult.FAILED, type(exc).__name__)
            raise
        self._note(request, AuditResult.OK)

    def refused(self, request: Request, why: str) -> None:
        """Write the line of a caller without the admin key, within a limit of such lines."""
        action = _action(request)
        now = self.clock()
        self.count(action, AuditResult.UNAUTHENTICATED)
        if now - self._since >= _SPAN_S:
            self._since = now
            self._lines_written = 0
        if self._lines_written >= _LINES:
            self._dropped += 1
            return
        self._lines_written += 1
        facts = _facts(request, action, AuditResult.UNAUTHENTICATED, why)
        if self._dropped:
            facts["unlogged_before"] = self._dropped
            self._dropped = 0
        note(LOG, facts, dict, _text)

    def _note(self, request: Request, result: AuditResult, why: str | None = None) -> None:
        action = _action(request)
        self.count(action, result)
        if action not in _READS:
            note(LOG, _facts(request, action, result, why), dict, _text)


def _action(request: Request) -> str:
    """Return the action, from a short list: it is the label of a counter."""
    last = request.url.path.rstrip("/").rpartition("/")[2]
    return last if last in _ACTIONS else "list"


def _facts(
    request: Request, action: str, result: AuditResult, why: str | None
) -> dict[str, object]:
    client = request.client
    target = getattr(request.state, "target", None)
    key = getattr(request.state, "admin", None) or "-"
    host = "-" if client is None else client.host
    facts: dict[str, object] = {
        "action": action,
        "outcome": result.value,
        "key": key,
        "client": host,
    }
    facts |= {} if target is None else {"target": target[:_TEXT_MOST]}
    return facts | ({} if why is None else {"why": why[:_TEXT_MOST]})


def _text(facts: Mapping[str, object]) -> str:
    """Return the facts in one line: a caller's text is quoted, and its line breaks are escaped."""
    return " ".join(
        f"{name}={value!r}" if name in ("target", "why") else f"{name}={value}"
        for name, value in facts.items()
    )
