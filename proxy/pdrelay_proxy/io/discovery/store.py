"""The interface of stores, which keep the engines that operators add."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from pdrelay_proxy.core.ports import Observer, SharedText


class StoreDown(Exception):
    """The store did not acknowledge a change: it may or may not have been made.

    The message says why.
    """


class StoreNotWritten(StoreDown):
    """The change was not made: the store accepts no more, such as a full disk."""


StoreObserver: TypeAlias = Observer[str]


class Store(Protocol):
    """Keeps texts by name.

    Every later view has an acknowledged change, also at other routers.

    The latest view of a store stays until the next; a store that cannot be reached sends none.
    """

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreDown.

        When this returns, the entry is kept, and the observer has received it.
        """
        ...

    async def delete(self, name: str, /) -> None:
        """Drop an entry, if it is there; promises what ``put`` does."""
        ...

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write or drop (None) an entry, if it is still ``before``; promises what ``put`` does.

        Return whether the entry is now ``after``. If not, nothing has changed, and the observer has
        received the present view.
        """
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Send views to the observer while the block lasts, whichever router makes the changes."""
        ...


class SharedStore(Protocol):
    """A place in which several routers keep engines and short texts. Its methods raise
    ConfigError: a dependency is missing.
    """

    def engines(self, observer: StoreObserver, clock: Callable[[], float]) -> Store:
        """Return the store of engines; ``clock``: seconds, of which only differences count."""
        ...

    def text(self, name: str, *, lasts_s: float) -> SharedText:
        """Return a text beside the engines, after their store.

        ``lasts_s``: the duration of the lease in the text.
        """
        ...


def replace_entry(entries: dict[str, str], name: str, before: str, after: str | None) -> None:
    """Apply ``Store.replace`` to a dict of entries."""
    if entries.get(name) != before:
        return
    if after is None:
        del entries[name]
    else:
        entries[name] = after
