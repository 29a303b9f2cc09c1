"""What is known of an engine that decides with whom it can share a request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Final, TypeAlias

from pdrelay_proxy.core.fleet import push_coordinates
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.one_line import one_line
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.core.schemas import ModelCard

# What a prefill engine's answers have taught.
MODES: Final[Mapping[push_coordinates.CoordinatesState, EngineMode]] = {
    push_coordinates.CoordinatesState.PULL: EngineMode.PULL,
    push_coordinates.CoordinatesState.PUSH: EngineMode.PUSH,
    push_coordinates.CoordinatesState.SEVERAL: EngineMode.PUSH,
}

NO_SLICE: Final = ""  # stands for engines without one, where these are a slice of their own
# by the slice of an engine: `pairs_within` of its facts
PairsWithin: TypeAlias = Callable[[str | None], str | None]


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Learned from an engine's own answers; None: not known (yet), and fits everything."""

    models: frozenset[str] | None = None  # /v1/models, with its LoRA adapters
    version: str | None = None  # /version; two versions of vLLM refuse each other's handshake
    connector: str | None = None  # whose metrics it shows: pdrelay or nixl
    # prefill: as its answers say; decode: as it was declared (URL#mode=push)
    mode: EngineMode | None = None
    revision: str | None = None  # of its deployment, as its pod or its operator says
    protocol: str | None = None  # of our connector's side channel; others refuse each other
    # of model, cache and vLLM, as our connector sees them; others refuse each other
    fingerprint: str | None = None
    engine_id: str | None = None  # prefill: by which decode engines know it
    # decode: engine ids of those it has met and cannot load from
    incompatible: frozenset[str] | None = None
    adapters: frozenset[str] | None = None  # those of the models that are LoRA adapters
    slice: str | None = None  # its zone, rack or NVLink domain, as its pod or its operator says
    pairs_within: str | None = None  # the slice that its partners must be of; None: any
    # vLLM's, as our connector shows it: only kv_both can serve another role
    kv_role: str | None = None
    # decode: prefill engines that it cannot meet (pair_history.py)
    resting: frozenset[InstanceId] | None = None
    # where its base model's files lie, as /v1/models says; its own connector says more
    root: str | None = None
    started: str | None = None  # when its process began, as its metrics write it
    # The names of its base model: ``models`` without ``adapters`` (registry.py).
    bases: frozenset[str] | None = field(default=None, compare=False)
    # The roots of its adapters by name, and of its base model under no name; also where the
    # connector's fingerprint has taken the place of ``root`` (fleet_models.py).
    files: Mapping[str, str] | None = None

    def serves(self, model: str | None) -> bool:
        """Tell whether a request for a model may go there; None: the request names none."""
        return model is None or self.models is None or model in self.models

    def files_of(self, model: str | None) -> str | None:
        """Return where the files of a model lie: a stream that another engine has begun goes on
        with the same ones. None: not known.
        """
        if self.files is None:
            return None
        base = self.files.get("")
        return base if model is None else self.files.get(model, base)

    def adapter_root(self, model: str | None) -> str | None:
        """Return where the files of an adapter lie, if engines that share requests for it must have
        the same ones.

        None: not known, no adapter, or our connector is there, which compares the weights itself.
        """
        if self.root is None or self.files is None or not model:
            return None
        return self.files.get(model)

    def in_one_line(self) -> "EngineCapabilities":
        """Return these facts with no line break in any: they stand in logs, tables and labels."""
        changed: dict[str, Any] = {
            name: one_line(fact) if isinstance(fact, str) else frozenset(map(one_line, fact))
            for name in _WRITTEN
            if not _is_printable(fact := getattr(self, name))
        }
        return replace(self, **changed) if changed else self

    def updated(self, newer: "EngineCapabilities") -> "EngineCapabilities":
        """Return these facts but for newer ones; an empty text is none, but for NO_SLICE."""
        found = {
            name: fact
            for name in _FACTS
            if (fact := getattr(newer, name)) is not None and (fact != "" or name == _WITHIN)
        }
        if newer.connector not in (None, self.connector):  # what the one before said of itself
            found = dict.fromkeys(_OF_CONNECTOR) | found
        return replace(self, **found)


def facts_of_models(cards: Sequence[ModelCard]) -> EngineCapabilities:
    """Return what an engine's list of models says of it."""
    root = next((card.root for card in cards if card.parent is None), None)
    roots = {"" if card.parent is None else card.id: card.root for card in reversed(cards)}
    return EngineCapabilities(
        frozenset([card.id for card in cards]),
        adapters=frozenset([card.id for card in cards if card.parent is not None]),
        root=root,
        files={name: known for name, known in roots.items() if known is not None} or None,
    )


_FACTS: Final = [fact.name for fact in fields(EngineCapabilities)]
_OF_CONNECTOR: Final = ("protocol", "fingerprint", "engine_id", "kv_role")
_WITHIN: Final = "pairs_within"
_WRITTEN: Final = [name for name in _FACTS if name != "files"]


def _is_printable(fact: str | frozenset[str] | None) -> bool:
    if fact is None or isinstance(fact, str):
        return fact is None or fact.isprintable()
    return all(map(str.isprintable, fact))


# Facts that are equal, or unknown, where two engines fit; the last one is a set, and one name in
# common will do.
Compared: TypeAlias = tuple[str | frozenset[str] | None, ...]

_COMPARED: Final = {
    "version": "vLLM's version",
    "connector": "the connector",
    "mode": "the mode",
    "revision": "the revision",
    "protocol": "the connector's protocol",
    "fingerprint": "the connector's fingerprint",
    "pairs_within": "the slice",
    "root": "the root of the model",
    "bases": "the model",  # it stays the last one: see ``agree``
}
WITHIN: Final = [*_COMPARED].index(_WITHIN)  # the place of the slice among them
compared: Final[Callable[[EngineCapabilities], Compared]] = attrgetter(*_COMPARED)
# The same without the slice, which is no part of what a rollout changes.
without_slice: Final[Callable[[EngineCapabilities], Compared]] = attrgetter(
    *[n for n in _COMPARED if n != _WITHIN]
)


def fit(prefill: EngineCapabilities, decode: EngineCapabilities, model: str | None = None) -> bool:
    """Tell whether two engines can share a request for a model; None: for their base model."""
    if prefill.engine_id in (decode.incompatible or ()):
        return False
    if model is not None:
        theirs = prefill.adapter_root(model)
        ours = decode.adapter_root(model)
        if theirs is not None and ours is not None and theirs != ours:
            return False
    return agree(compared(prefill), compared(decode))


def agree(prefill: Compared, decode: Compared) -> bool:
    """Tell whether facts are equal or unknown, and the base models are one: no KV cache is read
    across two of them.
    """
    # A generator takes three times as long, and kinds are compared with kinds.
    if prefill == decode:
        return True
    if False in [
        a is None or b is None or a == b for a, b in zip(prefill[:-1], decode[:-1], strict=True)
    ]:
        return False
    return _have_common_name(prefill[-1], decode[-1])


def have_common_model(first: EngineCapabilities, second: EngineCapabilities) -> bool:
    """Tell whether two engines serve one base model, as far as it is known."""
    return _have_common_name(first.bases, second.bases)


def _have_common_name(
    first: str | frozenset[str] | None, second: str | frozenset[str] | None
) -> bool:
    """Tell whether two base models are one: each may have several names."""
    if not isinstance(first, frozenset) or not isinstance(second, frozenset):
        return True
    return not first.isdisjoint(second)


def rests(prefill: InstanceId, decode: EngineCapabilities) -> bool:
    """Tell whether a decode engine gets no requests with a prefill engine, although they fit."""
    return decode.resting is not None and prefill in decode.resting


def difference(prefill: EngineCapabilities, decode: EngineCapabilities) -> str:
    """Say why two engines do not fit."""
    reasons = differences(prefill, decode)
    return reasons[0] if reasons else "it has refused that one's KV cache, and its log says why"


def differences(there: EngineCapabilities, here: EngineCapabilities) -> Sequence[str]:
    """Say in which facts two engines do not fit; empty: none of those that are known."""
    reasons = list[str]()
    for name, theirs, ours in zip(_COMPARED.values(), compared(there), compared(here), strict=True):
        if theirs is None or ours is None or theirs == ours:
            continue
        if isinstance(theirs, str) or not _have_common_name(theirs, ours):
            reasons.append(f"{name} is {_words(theirs)} there and {_words(ours)} here")
    return reasons


def _words(fact: str | frozenset[str] | None) -> str:
    return ", ".join(sorted(fact)) if isinstance(fact, frozenset) else str(fact)


def always(_prefill: object, _decode: object) -> bool:
    """Fit: it is known that all do."""
    return True
