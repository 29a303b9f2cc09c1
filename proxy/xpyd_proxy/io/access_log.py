"""The line of a request in the log."""

import logging
from collections.abc import Mapping
from typing import Final, TypeAlias

from xpyd_proxy.core.request_record import Outcome, RequestRecord, facts, tenths
from xpyd_proxy.io.logs import REQUESTS, SHEET, note

_PLAIN: Final = ("id", "path", "prefill", "decode", "status", "ms")  # these stand in the line without quotes
_USUAL: Final = " ".join([f"{name}=%s" for name in _PLAIN])
_Where: TypeAlias = tuple[str, str | None, str | None]  # path, prefill engine, decode engine
_WHERE: Final[dict[_Where, str]] = {}  # how that is written
_WHERE_MOST: Final = 1024
_NAME: Final = REQUESTS.name


def log_request(record: RequestRecord, outcome: Outcome) -> None:
    """Write the line of a request that is over."""
    if SHEET.is_open and record.is_usual:
        ms = tenths(outcome.seconds * 1000)
        where = _where(record, outcome)
        SHEET.add(_NAME, f"id={record.request_id} {where} status={outcome.status} ms={ms // 10}.{ms % 10}")
    elif REQUESTS.isEnabledFor(logging.INFO):
        note(REQUESTS, facts(record, outcome), _text)


def _where(record: RequestRecord, outcome: Outcome) -> str:
    """Write where a request went; there are as many such places as paths and pairs of engines."""
    prefill, decode = record.prefill, record.decode
    places = outcome.path, None if prefill is None else prefill.instance, None if decode is None else decode.instance
    found = _WHERE.get(places)
    if found is None:
        found = " ".join([_pair(name, place) for name, place in zip(_PLAIN[1:4], places, strict=True)])
        if len(_WHERE) >= _WHERE_MOST:
            _WHERE.clear()
        _WHERE[places] = found
    return found


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
