"""The records of the latest requests that are over, for operators who ask what happened to one
(docs/why.md).
"""

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
        """Keep records, without what they hold of answers, and forget the oldest.

        Requests that were not admitted are not kept: strangers could send so many that no other is
        left. Nor are the prompts of a request that has thousands: its own record has the notable
        ones.
        """
        for record in records:
            record.end = NO_END
            # the latter of a session
            was_admitted = record.queue_s is not None or record.decode is not None
            if was_admitted and not isinstance(record, PromptRecord):
                self._over.append(record)

    def find(self, name: str) -> Sequence[RequestRecord]:
        """Return the records with this name, the latest first."""
        return [found for record in reversed(self._over) for found in records_named(record, name)][
            :MOST_FOUND
        ]

    def find_beginning(self, beginning: str) -> Sequence[RequestRecord]:
        """Return the records with a name that begins so, the latest first."""
        return [record for record in reversed(self._over) if name_begins(record, beginning)]


def records_named(record: RequestRecord, name: str) -> Sequence[RequestRecord]:
    """Return a request if it has this name, the router's or its client's, or the one of its prompts
    that has it.
    """
    own = record.request_id
    if name in (own, record.client_id):
        return (record,)
    if record.parts is None or not name.startswith(own):
        return ()
    return [part for part in record.parts.notable if part.request_id == name]


def name_begins(record: RequestRecord, beginning: str) -> bool:
    """Tell whether a request has a name that begins so."""
    return record.request_id.startswith(beginning) or (record.client_id or "").startswith(beginning)
