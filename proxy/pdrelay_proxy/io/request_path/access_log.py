"""The access log: a line for each request, by the logger ``pdrelay.access``.

Ids and our own words, nothing private.
"""

import logging
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.milliseconds import written_ms
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.io.logs import note_all

LOG: Final = logging.getLogger("pdrelay.access")  # by this name people filter


def log_requests(records: Sequence[RequestRecord]) -> None:
    """Write the lines of some requests."""
    if LOG.isEnabledFor(logging.INFO):
        note_all(LOG, records, fields, text)


def fields(record: RequestRecord) -> dict[str, object]:
    """Return what the line says: always the same fields, and what was unusual."""
    prefill = record.prefill
    decode = record.decode
    prefill_ms = None if prefill is None else prefill.ms
    line: dict[str, object] = {
        "request_id": record.request_id,
        "path": record.path,
        "prefill": None if prefill is None else prefill.instance,
        "decode": None if decode is None else decode.instance,
        "status": record.status,
        "duration_ms": round(record.duration_s * 1000, 1),
        "ttft_ms": None if record.ttft_s is None else round(record.ttft_s * 1000, 1),
        "prefill_ms": None if prefill_ms is None else round(prefill_ms, 1),
        "queue_ms": None if record.queue_s is None else round(record.queue_s * 1000, 1),
    }
    if not record.is_usual():
        line.update(_unusual(record))
    return line


def text(record: RequestRecord) -> str:
    """Return the same as one line for people, whatever a path or an error has in it."""
    prefill = record.prefill
    decode = record.decode
    path = record.path
    ttft_s = record.ttft_s
    queue_s = record.queue_s
    if path not in ENDPOINTS and (not (path.isascii() and path.isprintable()) or "\\" in path):
        path = path.encode("unicode_escape").decode()
    prefill_ms = None if prefill is None else prefill.ms
    line = (
        f"request_id={record.request_id} path={path} "
        f"prefill={'-' if prefill is None else prefill.instance} "
        f"decode={'-' if decode is None else decode.instance} status={record.status} "
        f"duration_ms={written_ms(record.duration_s * 1000)} "
        f"ttft_ms={'-' if ttft_s is None else written_ms(ttft_s * 1000)} "
        f"prefill_ms={'-' if prefill_ms is None else written_ms(prefill_ms)} "
        f"queue_ms={'-' if queue_s is None else written_ms(queue_s * 1000) if queue_s else '0.0'}"
    )
    if record.is_usual():
        return line
    return line + "".join([f" {name}={value!r}" for name, value in _unusual(record).items()])


def _unusual(record: RequestRecord) -> dict[str, object]:
    notes: tuple[tuple[str, str | None], ...] = (
        ("client_id", record.client_id),
        ("single_reason", record.single_reason and str(record.single_reason)),
        ("mode", record.push and str(record.push)),
        ("transfer", record.transfer),
        (
            "retries",
            ", ".join([str(retry) for retry in record.retries]) if record.retries else None,
        ),
        ("moves", ", ".join([str(move) for move in record.moves]) if record.moves else None),
        ("prefill_error", record.prefill_error),
        ("error", record.error),
    )
    return {name: value for name, value in notes if value}
