"""The host memory that KV goes through where NIXL cannot or shall not reach the device."""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from pdrelay_connector.core.ports import Copier
from pdrelay_connector.core.staging.slots import Slots

OwnerT = TypeVar("OwnerT", bound=Hashable)


class HostBuffer(NamedTuple, Generic[OwnerT]):
    """The slots of a host buffer, and what copies between them and the cache."""

    slots: Slots[OwnerT]
    copier: Copier
