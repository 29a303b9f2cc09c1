"""The interface of stores, which keep the engines that operators add."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias, TypeVar

from pdrelay_proxy.core.ports import SharedText

S_contra = TypeVar("S_contra", contravariant=True)


class StoreDown(Exception):
    """The store did not acknowledge a change: it may or may not have been made.

    The message says why.
    """


class StoreNotWritten(StoreDown):
    """The change was not made: the store accepts no more, such as a full disk."""


class Observer(Protocol[S_contra]):
    """Receives views: texts of a store, objects of the Kubernetes API."""

    async def receive(self, objects: Mapping[str, S_contra], /) -> None:
        """Take in all objects, by name or uid, in steps between which other tasks run.

        When this returns, this view or a later one has been taken in; a later one may come before
        that.
        """
        ...

    def heard(self) -> None:
        """Note that the source answers, and that its latest view is still right."""
        ...


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
