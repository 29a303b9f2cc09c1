"""The models that engines say they serve, and what a request means that names none."""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import LEAVING
from pdrelay_proxy.core.fleet.member_table import MemberTable
from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.errors import BadRequest

_NAME_MOST: Final = 100  # characters of one model's name in a message
_MOST_MODELS: Final = 10  # names in one message: an engine may have thousands of adapters
# sets of models; beyond, those that no engine serves any more are forgotten
_MOST_SHARED: Final = 1024


class FleetModels:
    """Of all engines."""

    __slots__ = ("_bases", "_files", "_listed", "_served", "_sets", "_table")

    def __init__(self, table: MemberTable) -> None:
        self._table = table
        # Sets of models that engines serve, or of their base models, so that equal ones are the
        # same: thousands are then compared in no time.
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        # likewise: where the files of a set of models lie, as an engine has said last
        self._files: dict[frozenset[str], Mapping[str, str]] = {}
        # the names in them, and for which changes
        self._served: tuple[int, frozenset[str]] = (-1, frozenset())
        # of engines that serve, likewise
        self._bases: tuple[int, frozenset[frozenset[str]]] = (-1, frozenset())
        # what ``listed`` has said, likewise
        self._listed: tuple[int, str] = (-1, "")

    @property
    def names(self) -> frozenset[str]:
        """The names of all models."""
        version, names = self._served
        if version != self._table.changes.count:
            members = self._table.by_id.values()
            names = frozenset[str]().union(
                *{member.facts.models for member in members if member.facts.models is not None}
            )
            self._served = self._table.changes.count, names
        return names

    def of_unnamed(self) -> str | None:
        """Return the model that a request means which names none: the one base model of all engines
        that serve.

        None: no engine has said what it serves. An adapter does not count: its engine serves its
        base model, too. Raises BadRequest: there are several.
        """
        version, bases = self._bases
        if version != self._table.changes.count:
            lives = [
                member for member in self._table.by_id.values() if member.life.state not in LEAVING
            ]
            bases = frozenset(
                [member.facts.bases for member in lives if member.facts.bases is not None]
            )
            self._bases = self._table.changes.count, bases
        if not bases:
            return None
        first, *others = bases
        common = first.intersection(*others)
        if not common:
            raise BadRequest(
                f"name a model: the engines behind this router serve "
                f"{first_of(frozenset[str]().union(*bases))}",
                param="model",
            )
        return min(common)

    def listed(self) -> str:
        """Name the models for a message, base models first.

        It is kept: a client may ask again and again for one that is not served.
        """
        version, text = self._listed
        if version != self._table.changes.count:
            adapters = [
                member.facts.adapters
                for member in self._table.by_id.values()
                if member.facts.adapters
            ]
            text = first_of(self.names, frozenset[str]().union(*adapters))
            self._listed = self._table.changes.count, text
        return text

    def shared(self, facts: EngineCapabilities) -> EngineCapabilities:
        """Return facts with what follows from them; engines share equal sets of models."""
        facts = facts.in_one_line()
        # that of our connector tells models apart better
        if facts.fingerprint is not None and facts.root is not None:
            facts = replace(facts, root=None)
        if facts.models is None:
            return facts
        models = self._same(facts.models)
        adapters = None if facts.adapters is None else self._same(facts.adapters)
        bases = models if not adapters else self._same(models - adapters)
        files = facts.files
        if files is not None and (known := self._files.get(models)) is not files:
            files = self._files[models] = known if known is not None and known == files else files
        if models is facts.models and bases is facts.bases and files is facts.files:
            return facts
        return replace(facts, models=models, adapters=adapters, bases=bases, files=files)

    def _same(self, names: frozenset[str]) -> frozenset[str]:
        """Return the set of these names that other engines have."""
        shared = self._sets.get(names)
        if shared is None:
            if len(self._sets) >= _MOST_SHARED:
                all_facts = [member.facts for member in self._table.by_id.values()]
                known = [
                    names
                    for facts in all_facts
                    for names in (facts.models, facts.adapters, facts.bases)
                ]
                self._sets = {names: names for names in known if names is not None}
                self._files.clear()
            shared = self._sets.setdefault(names, names)
        return shared


def first_of(models: Set[str], last: Set[str] = frozenset()) -> str:
    """Name the first of some models, and how many more there are; ``last``: those that are named
    after the others.
    """
    names = sorted(models, key=lambda name: (name in last, name))
    more = len(names) - _MOST_MODELS
    named = ", ".join([clipped(name) for name in names[:_MOST_MODELS]])
    return f"{named}, and {more} more" if more > 0 else named or "none"


def clipped(name: str) -> str:
    """Return as much of a model's name as a message has room for."""
    return shortened(name, _NAME_MOST)
