"""Keeps the latest view of a store, and tells the reconciler its engines and their roles."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.discovery.store_entries import (
    Assignment,
    entry_name,
    read_entry,
    shown_name,
)
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Wanted
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.io.background import finish_in_any_case
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import Reconciler

_TEXTS_AT_ONCE: Final = 50  # entries parsed in one step


class Entries:
    """Takes in the store's texts, which people may have edited."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._view = EngineObjects(reconciler, EngineSource.STORE)
        self._texts: Mapping[str, str] = {}  # by name, of the latest view
        self._assignments: dict[str, Assignment] = {}  # by name, of the latest view
        self._waiting: Mapping[str, str] | None = None  # the latest view, until it is taken in
        self._lock = asyncio.Lock()
        self.heard = self._view.heard

    def engine(self, name: str) -> tuple[str, Wanted] | None:
        """Return the text of an entry of the latest view, and its engine; None: there is none."""
        text = self._texts.get(name)
        entry = None if text is None else _entry(text)
        return (text, entry) if text is not None and isinstance(entry, Wanted) else None

    def names_at(self, key: Key) -> Sequence[str]:
        """List the names of the entries that may name an engine at an address."""
        return [*dict.fromkeys((entry_name(key), *self._view.names_at(key)))]

    async def receive(self, entries: Mapping[str, str], /) -> None:
        """Take in all entries, or those of a later view, after the view that is being taken in.

        Other tasks run in between.
        """
        self._waiting = entries
        async with self._lock:
            while (latest := self._waiting) is not None:
                self._waiting = None
                # the store would not send it again
                await finish_in_any_case(self.view_in_steps(latest))

    def view_in_steps(self, entries: Mapping[str, str]) -> Generator[None]:
        """Take in all entries in steps. Of what may be thousands, only changed ones are parsed."""
        before = self._texts
        self._texts = dict(entries)
        engines = dict[str, Wanted | AddressError | None]()
        for name in before:
            if name not in entries:
                engines[name] = None
                self._assignments.pop(name, None)
        changed = [(name, text) for name, text in entries.items() if before.get(name) != text]
        for number, (name, text) in enumerate(changed, start=1):
            entry = _entry(text)
            self._assignments.pop(name, None)
            if isinstance(entry, Assignment):
                engines[name] = None
                self._assignments[name] = entry
            else:
                engines[name] = (
                    entry
                    if isinstance(entry, Wanted)
                    else AddressError(f"entry {shown_name(name)}: {entry}")
                )
            if number % _TEXTS_AT_ONCE == 0:
                yield
        is_first = EngineSource.STORE in self._reconciler.sources.missing
        view = (
            self._view.view_in_steps(engines) if is_first else self._view.changed_in_steps(engines)
        )
        assignments = [self._assignments[name] for name in entries if name in self._assignments]
        yield from self._reconciler.roles.receive_in_steps(
            {entry.key: entry for entry in assignments}, view
        )


def _entry(text: str) -> Wanted | Assignment | AddressError:
    try:
        return read_entry(text)
    except AddressError as exc:
        return exc
