"""The records of the latest finished requests, for operators (docs/why.md)."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.request_record import NO_END, PromptRecord, RequestRecord

MOST_FOUND: Final = 64  # records of one name: a client may give one to many requests


class RequestHistory:
    """A ring of records."""

    def __init__(self, most: int) -> None:
        """``most``: records that are kept."""
        self._over: deque[RequestRecord] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._over)

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Keep records, without the ends of their answers, and forget the oldest.

        Refused requests are not kept: unknown clients could push all others out. Nor are the
        records of single prompts: a request may have thousands, and keeps the notable ones itself.
        """
        for record in records:
            record.end = NO_END
            # a realtime session has no queue, but a decode engine
            was_admitted = record.queue_s is not None or record.decode is not None
            if was_admitted and not isinstance(record, PromptRecord):
                self._over.append(record)

    def find(self, name: str) -> Sequence[RequestRecord]:
        """Return the records with this name, the latest first."""
        return [named for record in reversed(self._over) for named in records_named(record, name)][
            :MOST_FOUND
        ]

    def find_beginning(self, beginning: str) -> Sequence[RequestRecord]:
        """Return the records with a name that begins like this, the latest first."""
        return [record for record in reversed(self._over) if name_begins(record, beginning)]


def records_named(record: RequestRecord, name: str) -> Sequence[RequestRecord]:
    """Return the request if it has this name (of router or client), or its prompts that have it."""
    own = record.request_id
    if name in (own, record.client_id):
        return (record,)
    if record.parts is None or not name.startswith(own):
        return ()
    return [part for part in record.parts.notable if part.request_id == name]


def name_begins(record: RequestRecord, beginning: str) -> bool:
    """Tell whether a name of the request begins like this."""
    return record.request_id.startswith(beginning) or (record.client_id or "").startswith(beginning)
