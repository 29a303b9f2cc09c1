"""Our own host memory that KV goes through, where NIXL cannot or shall not reach the device."""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from xpyd_connector.core.ports import Copier
from xpyd_connector.core.staging.slots import Slots

TicketT = TypeVar("TicketT", bound=Hashable)


class Staging(NamedTuple, Generic[TicketT]):
    """The room there is, and what copies between it and the cache."""

    slots: Slots[TicketT]
    copier: Copier
