"""The access log: one line for each request, as the logger ``xpyd.access``. Ids and our own words, nothing private."""

import logging
from collections.abc import Mapping
from typing import Final

from xpyd_proxy.core.request_record import RequestRecord, tenths
from xpyd_proxy.io.logs import note

LOG: Final = logging.getLogger("xpyd.access")  # by this name people filter
_ALWAYS: Final = (  # without quotes in a line for people
    "request_id",
    "path",
    "prefill",
    "decode",
    "status",
    "duration_ms",
    "ttft_ms",
    "prefill_ms",
    "queue_ms",
)


def log_request(record: RequestRecord) -> None:
    """Write the line of a request that is over."""
    if LOG.isEnabledFor(logging.INFO):
        note(LOG, fields(record), _text)


def fields(record: RequestRecord) -> Mapping[str, object]:
    """Return what the line says: always the same fields, and what was unusual."""
    prefill, decode, ttft_s, queue_s = record.prefill, record.decode, record.ttft_s, record.queue_s
    prefill_ms = None if prefill is None else prefill.ms
    found: dict[str, object] = {
        "request_id": record.request_id,
        "path": record.path,
        "prefill": None if prefill is None else prefill.instance,
        "decode": None if decode is None else decode.instance,
        "status": record.status,
        "duration_ms": tenths(record.duration_s * 1000) / 10,
        "ttft_ms": None if ttft_s is None else tenths(ttft_s * 1000) / 10,
        "prefill_ms": None if prefill_ms is None else tenths(prefill_ms) / 10,
        "queue_ms": None if queue_s is None else tenths(queue_s * 1000) / 10,
    }
    if record.client_id is not None:
        found["client_id"] = record.client_id
    if record.single_reason is not None:
        found["single_reason"] = str(record.single_reason)
    if record.push is not None:
        found["mode"] = str(record.push)
    if record.transfer is not None:
        found["transfer"] = record.transfer
    if record.retries:
        found["retries"] = ", ".join([str(retry) for retry in record.retries])
    if record.prefill_error is not None:
        found["prefill_error"] = record.prefill_error
    if record.error is not None:
        found["error"] = record.error
    return found


def _text(found: Mapping[str, object]) -> str:
    """Write the fields in one line."""
    return " ".join([_pair(name, value) for name, value in found.items()])


def _pair(name: str, value: object) -> str:
    """Write one field; a line break in a path or an error stays on its line."""
    if name not in _ALWAYS:
        return f"{name}={value!r}"
    if value is None:
        return f"{name}=-"
    if name == "path":
        path = str(value)
        if not (path.isascii() and path.isprintable()) or "\\" in path:
            return f"path={path.encode('unicode_escape').decode()}"
    return f"{name}={value}"
