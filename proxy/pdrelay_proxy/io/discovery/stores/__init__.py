"""Where engines that were added by hand are kept: in this process, in a file, or where other
routers see them, too.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias, TypeVar

S_contra = TypeVar("S_contra", contravariant=True)


class StoreDown(Exception):
    """The store did not acknowledge a change: it may or may not have been made.

    The message says why.
    """


class StoreNotWritten(StoreDown):
    """The change was not made: what holds the store takes nothing more, such as a full disk."""


class Observer(Protocol[S_contra]):
    """Hears what there is: texts in a store, objects of the Kubernetes API."""

    async def take(self, objects: Mapping[str, S_contra], /) -> None:
        """Take all there are, by name or uid, in steps between which others run.

        When this returns, they have been taken in, or what has been told since; another view may be
        told before that.
        """
        ...

    def heard(self) -> None:
        """Note that the source answers, and the view of before is still so."""
        ...


StoreObserver: TypeAlias = Observer[str]


class Store(Protocol):
    """Keeps texts by name.

    A change that is acknowledged is in every later view, also in those of other routers.

    What a store has said last stays until it says something else; when it cannot be reached, it
    says nothing.
    """

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry.

        When this returns, it is kept and the observer has taken it in; raises StoreDown.
        """
        ...

    async def delete(self, name: str, /) -> None:
        """Drop an entry, if it is there; the same promise."""
        ...

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write an entry anew, or drop it (None), if it is still as it was; the same promise.

        Return whether it is now as wanted. If not, nothing has changed, and the observer has taken
        in what is there.
        """
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Tell of changes, whoever makes them, while the block lasts."""
        ...


def replace_entry(entries: dict[str, str], name: str, before: str, after: str | None) -> None:
    """Do to entries what ``Store.replace`` says."""
    if entries.get(name) != before:
        return
    if after is None:
        del entries[name]
    else:
        entries[name] = after
