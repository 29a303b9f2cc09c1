"""The line of a request in the log."""

import logging
from collections.abc import Mapping
from typing import Final

from xpyd_proxy.core.journey import Journey, Outcome, facts
from xpyd_proxy.io.logs import note

_PLAIN: Final = ("id", "path", "prefill", "decode", "status", "ms")  # these stand in the line without quotes
_USUAL: Final = " ".join([f"{name}=%s" for name in _PLAIN])
logger = logging.getLogger("xpyd_proxy.api.tracking")  # by this name people filter


def log_request(journey: Journey, outcome: Outcome) -> None:
    """Write the line of a request that is over."""
    if logger.isEnabledFor(logging.INFO):
        note(logger, facts(journey, outcome), _text)


def _text(found: Mapping[str, object]) -> str:
    """Write the facts; nearly always there are only the plain ones, and one look at all of them is enough."""
    if len(found) == len(_PLAIN):
        line = _USUAL % tuple(["-" if value is None else value for value in found.values()])
        if line.isascii() and line.isprintable() and "\\" not in line:
            return line
    return " ".join([_pair(name, value) for name, value in found.items()])


def _pair(name: str, value: object) -> str:
    """Write one fact; a line break in a path or a note stays on its line."""
    if name not in _PLAIN:
        return f"{name}={value!r}"
    text = "-" if value is None else str(value)
    if not (text.isascii() and text.isprintable()) or "\\" in text:
        text = text.encode("unicode_escape").decode()
    return f"{name}={text}"
