"""Puts the store that an operator has chosen into a router."""

from collections.abc import Callable, Sequence
from typing import Final

from pdrelay_proxy.features.feature import Feature
from pdrelay_proxy.features.stores.settings import MEMORY, StoreSettings
from pdrelay_proxy.features.stores.store_location import StoreLocation
from pdrelay_proxy.io.discovery.store import SharedStore
from pdrelay_proxy.settings import Settings


class StoresFeature(Feature):
    """Has routers share the engines that operators add, and remember them after a restart."""

    @staticmethod
    def finds_engines(settings: Settings, /) -> bool:
        """Tell whether another router may have added engines."""
        return settings.for_feature(StoreSettings).store != MEMORY

    @staticmethod
    def shared_store(settings: Settings, /) -> SharedStore | None:
        """Return the store of the settings; None: the memory of each router."""
        location = settings.for_feature(StoreSettings).store
        return None if location == MEMORY else StoreLocation(location)

    @staticmethod
    def for_workers(settings: Settings, folder: Callable[[], str], /) -> Sequence[object]:
        """Return a file for all workers, if each would have its own memory."""
        if settings.for_feature(StoreSettings).store != MEMORY:
            return ()
        return (StoreSettings(f"file:{folder()}/engines"),)


FEATURE: Final = StoresFeature
