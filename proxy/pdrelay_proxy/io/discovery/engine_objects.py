"""Keeps the objects of one source, and tells the reconciler which engines they are."""

import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.fleet.target import EngineSource, Key, Wanted
from pdrelay_proxy.core.steps import finish, portions
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.io.background import finish_in_any_case
from pdrelay_proxy.io.discovery.reconciler import AT_ONCE, Reconciler

logger = logging.getLogger(__name__)
_LEFT_OUT: Final = "left out: %.1000s"  # an annotation, or an entry, may have a quarter of a MB
_READ_AT_ONCE: Final = 200  # objects sorted in one step: less than a millisecond


class EngineObjects:
    """Takes in the objects of a source: engines, and objects that cannot be read as one.

    The source is the watch of pods, or the store.
    """

    def __init__(self, reconciler: Reconciler, source: EngineSource = EngineSource.PODS) -> None:
        self._reconciler = reconciler
        self._source = source
        self._logged_errors: set[str] = set()
        self._objects: dict[str, Wanted | AddressError | None] = {}
        # engines by address, then by object: two objects may claim one address
        self._named: dict[Key, dict[str, Wanted]] = {}

    def view_in_steps(
        self, objects: Mapping[str, Wanted | AddressError | None], /
    ) -> Generator[None]:
        """Take in all objects, in steps; ``changed`` must wait until they are done."""
        errors = set[str]()
        named = dict[Key, dict[str, Wanted]]()
        for number, (name, item) in enumerate(objects.items(), start=1):
            if isinstance(item, Wanted):
                named.setdefault(item.key, {})[name] = item
            elif isinstance(item, AddressError):
                errors.add(str(item))
            if number % _READ_AT_ONCE == 0:
                yield
        for text in sorted(errors - self._logged_errors):
            logger.warning(_LEFT_OUT, text)
        self._logged_errors = errors
        self._objects = dict(objects)
        self._named = named
        yield from self._reconciler.view_in_steps(
            self._source, (item for item in objects.values() if isinstance(item, Wanted))
        )

    async def receive(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take in all objects; other tasks run between the steps.

        One view at a time, and ``changed`` waits for it.
        """
        await finish_in_any_case(self.view_in_steps(objects))  # the next view may never come

    def changed(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take in some objects that have changed; None: the object is gone, or no engine.

        The others are as they were.
        """
        finish(self.changed_in_steps(objects))

    def changed_in_steps(
        self, objects: Mapping[str, Wanted | AddressError | None]
    ) -> Generator[None]:
        """Take in changed objects in steps, those first that make room at an address."""
        keys = dict[Key, None]()
        for number, (name, new) in enumerate(objects.items(), start=1):
            old = self._objects.pop(name, None)
            if isinstance(old, Wanted):
                keys[old.key] = None
                self._named[old.key].pop(name, None)
            elif isinstance(old, AddressError) and str(old) != str(new):
                self._logged_errors.discard(str(old))
            if new is not None:
                self._objects[name] = new
            if isinstance(new, Wanted):
                keys[new.key] = None
                self._named.setdefault(new.key, {})[name] = new
            elif isinstance(new, AddressError) and str(new) not in self._logged_errors:
                self._logged_errors.add(str(new))
                logger.warning(_LEFT_OUT, new)
            if number % _READ_AT_ONCE == 0:
                yield
        order = sorted(keys, key=lambda key: bool(self._named.get(key)))
        # also if no address changed: the source was heard
        for portion in [*portions(order, AT_ONCE)] or [()]:
            self._reconciler.change(self._source, {key: self._at(key) for key in portion})
            yield

    def heard(self) -> None:
        """Note that the latest view is still right."""
        self._reconciler.heard(self._source)

    def names_at(self, key: Key) -> Sequence[str]:
        """List the objects that are engines at an address."""
        return [*self._named.get(key, ())]

    def _at(self, key: Key) -> Wanted | None:
        """Return the engine of an address: of two, one that does not leave, else the latest."""
        named = self._named.get(key)
        if not named:
            self._named.pop(key, None)
            return None
        return sorted(named.values(), key=lambda engine: not engine.leaves)[-1]
