"""The records of the latest requests that are over, for operators who ask what happened to one (docs/why.md)."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from xpyd_proxy.core.request_record import RequestRecord

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

        Requests that were not admitted are not kept: strangers could send so many that no other is left.
        """
        for record in records:
            if record.queue_s is not None or record.decode is not None:  # the latter of one of several prompts
                record.take_end()
                self._over.append(record)

    def find(self, name: str) -> Sequence[RequestRecord]:
        """Return the records with this name, the latest first."""
        return [record for record in reversed(self._over) if is_named(record, name)][:MOST_FOUND]

    def find_beginning(self, beginning: str) -> Sequence[RequestRecord]:
        """Return the records with a name that begins so, the latest first."""
        return [record for record in reversed(self._over) if name_begins(record, beginning)]


def is_named(record: RequestRecord, name: str) -> bool:
    """Tell whether a request has this name: the router's, its client's, or for one of several prompts the whole's."""
    own = record.request_id
    return name in (own, record.client_id) or own.startswith(f"{name}-p")


def name_begins(record: RequestRecord, beginning: str) -> bool:
    """Tell whether a request has a name that begins so."""
    return record.request_id.startswith(beginning) or (record.client_id or "").startswith(beginning)


def whole_id(record: RequestRecord) -> str:
    """Return the id of a request, for one of several prompts that of the whole."""
    return record.request_id.partition("-p")[0]
