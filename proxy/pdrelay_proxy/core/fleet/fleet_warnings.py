"""What is wrong with a fleet as a whole, in sentences for operators: no request and no probe of one
engine shows it.

They are there as soon as the facts are, and are gone with what they tell of. The log says each
once; ``/health``, the status page and ``pdrelay instances`` show those of now. They name engines by
id, never by address: clients read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import WITHIN, difference, have_common_model
from pdrelay_proxy.core.fleet.engine_kinds import EngineKinds, PrefillKind
from pdrelay_proxy.core.fleet.fleet_models import first_of
from pdrelay_proxy.core.fleet.health import LEAVING
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.named_engines import listed
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import EngineRole, InstanceId, Role

# The vLLM kv_role that serves nothing of a role, and what its engines do not do.
_USELESS_AS: Final[Mapping[EngineRole, tuple[str, str]]] = {
    EngineRole.PREFILL: ("kv_consumer", "it hands no KV cache over"),
    EngineRole.DECODE: ("kv_producer", "it loads no KV cache"),
}


@dataclass(frozen=True, slots=True)
class FleetWarning:
    """One sentence, and the engines that it is about."""

    engines: Sequence[InstanceId]
    text: str


class FleetWarnings:
    """Those that were found last: to look for them in a fleet of thousands takes milliseconds."""

    def __init__(self) -> None:
        self.texts: Sequence[str] = ()
        self._by_engine = dict[InstanceId, str]()

    def update(self, registry: Registry) -> Sequence[str]:
        """Look for them; return those that were not there before."""
        warnings = fleet_warnings(registry)
        before = self.texts
        self.texts = [warning.text for warning in warnings]
        by_engine: dict[InstanceId, str] = {}
        for warning in warnings:
            for name in warning.engines:
                by_engine[name] = (
                    f"{by_engine[name]}; {warning.text}" if name in by_engine else warning.text
                )
        self._by_engine = by_engine
        return [text for text in self.texts if text not in before]

    def for_engine(self, name: InstanceId) -> str | None:
        """Return what is wrong with an engine; None: nothing."""
        return self._by_engine.get(name)


def fleet_warnings(registry: Registry) -> Sequence[FleetWarning]:
    """Look for them."""
    members = [member for member in registry.members() if member.life.state not in LEAVING]
    return [*_of_kv_roles(members), *_of_twins(registry, members), *_of_models(members)]


def _of_kv_roles(members: Sequence[Member]) -> Sequence[FleetWarning]:
    """Say which engines were started for the other role, by their ``kv_role``."""
    wrong = {role: _useless_as(role, members) for role in _USELESS_AS}
    swapped = ": prefill and decode engines seem to be swapped" if all(wrong.values()) else ""
    warnings = list[FleetWarning]()
    for role, engines in wrong.items():
        kv_role, lacks = _USELESS_AS[role]
        for name in engines:
            text = (
                f"{name} is a {role} engine that was started with kv_role {kv_role}, so "
                f"{lacks}{swapped}"
            )
            warnings.append(FleetWarning((name,), text))
    return warnings


def _useless_as(role: EngineRole, members: Sequence[Member]) -> Sequence[InstanceId]:
    kv_role = _USELESS_AS[role][0]
    return [
        member.instance.id
        for member in members
        if member.role is role and member.facts.kv_role == kv_role
    ]


def _of_twins(registry: Registry, members: Sequence[Member]) -> Sequence[FleetWarning]:
    """Say which engines are others under another address."""
    warnings = list[FleetWarning]()
    for member in members:
        name = member.instance.id
        first = registry.twins.twin_of(name)
        if first is not None:
            text = (
                f"{name} is {first} under another address (one engine_id): {first} alone gets "
                f"requests"
            )
            warnings.append(FleetWarning((name, first), text))
    return warnings


def _of_models(members: Sequence[Member]) -> Sequence[FleetWarning]:
    """Say which base models are served by engines of one role alone.

    A decode engine may be meant to serve one alone, such as an embedder: it is named where a
    prefill engine lacks a partner, too, for then the two may have been meant for each other.
    """
    sides = {role: [member for member in members if member.role.serves(role)] for role in Role}
    if not all(sides.values()):
        return ()
    prefills = _without_partner(sides[Role.PREFILL], sides[Role.DECODE])
    if not prefills:
        return ()
    decodes = _without_partner(sides[Role.DECODE], sides[Role.PREFILL])
    warnings = list[FleetWarning]()
    for bases, engines in prefills.items():
        text = (
            f"{listed(engines)}: no decode engine serves {first_of(bases)}, so requests for it are "
            f"refused"
        )
        warnings.append(FleetWarning(engines, text))
    for bases, engines in decodes.items():
        text = (
            f"{listed(engines)}: no prefill engine serves {first_of(bases)}, so requests for it "
            f"are not split"
        )
        warnings.append(FleetWarning(engines, text))
    return warnings


def _without_partner(
    own: Sequence[Member], others: Sequence[Member]
) -> Mapping[frozenset[str], Sequence[InstanceId]]:
    """List the engines of one role by base model that no engine of the other role serves; what is
    not known may be it.

    Kinds of engines are compared: there may be thousands of engines.
    """
    known = {other.facts.bases for other in others}
    by_bases = dict[frozenset[str], list[InstanceId]]()
    if None in known:
        return by_bases
    served = frozenset[str]().union(*[bases for bases in known if bases is not None])
    for member in own:
        bases = member.facts.bases
        if bases and bases.isdisjoint(served):
            by_bases.setdefault(bases, []).append(member.instance.id)
    return by_bases


def pair_differences(members: Sequence[Member]) -> Mapping[tuple[InstanceId, InstanceId], str]:
    """Say why engines of one model cannot share requests, by decode and prefill engine; of engines
    alike, the first.

    A rollout of hundreds of engines has tens of thousands of such pairs, of two kinds. That those
    of two slices are apart is what the operator wants.
    """
    kinds = EngineKinds()
    for place, member in enumerate(members):
        if member.as_role(Role.DECODE) is not None:
            facts = member.facts
            kinds.add_decode(place, replace(facts, resting=None) if facts.resting else facts)
    for place, member in enumerate(members):
        if member.as_role(Role.PREFILL) is not None:
            kinds.add_prefill(place, member.instance.id, member.facts)
    prefills = dict[object, list[PrefillKind]]()  # by slice
    for prefill_kind in kinds.prefills:
        prefills.setdefault(prefill_kind.known[WITHIN], []).append(prefill_kind)
    found = dict[tuple[InstanceId, InstanceId], str]()
    for kind, fitting in kinds.fitting():
        decode = members[kind.places[0]]
        for other in prefills.get(kind.known[WITHIN], ()):
            prefill = members[other.places[0]]
            # those of two models need not fit
            if (
                other not in fitting
                and prefill is not decode
                and have_common_model(prefill.facts, decode.facts)
            ):
                pair = decode.instance.id, prefill.instance.id
                found[pair] = difference(prefill.facts, decode.facts)
    return found
