"""Where engines that were added by hand are kept: in this process, in a file, or where other routers see them, too."""

from xpyd_proxy.io.discovery.stores.port import Store, StoreDown

__all__ = ["Store", "StoreDown"]
