"""Engines that share no request with any engine of the other role, and why: each of them looks
healthy.
"""

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.compatibility import differences, fit, have_common_model
from pdrelay_proxy.core.fleet.engine_kinds import DecodeKind, EngineKinds, PrefillKind
from pdrelay_proxy.core.fleet.health import SERVING
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.named_engines import listed
from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId, Role

_AT_ONCE: Final = 500  # engines
_REASONS_MOST: Final = 3  # that are said: in a rollout of many revisions there are many


# Engines by kind: those of a kind fit the same engines.
ByKind: TypeAlias = Sequence[Sequence[Member]]


@dataclass(frozen=True, slots=True)
class LoneEngines:
    """Engines of a kind, and why they share no request."""

    engines: Sequence[InstanceId]
    text: str  # a sentence
    # an engine of the other role serves their model; else they may be meant to serve alone
    have_model: bool


def lone_engines_in_steps(
    registry: Registry, history: PairHistory
) -> Generator[None, None, Sequence[LoneEngines]]:
    """Look for them, in steps of a millisecond or so."""
    unmet = dict[InstanceId, set[InstanceId]]()  # as decode engines show it, before the pair rests
    for (prefill, decode), trouble in registry.troubles.items():
        if trouble.lasts:
            unmet.setdefault(decode, set()).add(prefill)
    kinds = yield from lone_kinds_in_steps(registry, unmet)
    lone_engines = list[LoneEngines]()
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        partners = [kind[0] for kind in kinds[other][0]]
        for kind in kinds[role][1]:
            names = [member.instance.id for member in kind]
            near = [
                partner_kind
                for partner_kind in partners
                if have_common_model(partner_kind.facts, kind[0].facts)
            ]
            reasons = dict.fromkeys(
                _why_apart(registry, history, role, kind[0], partner)
                for partner in near or partners
            )
            shown = "; ".join([*reasons][:_REASONS_MOST])
            text = (
                f"{listed(names)}: no {other} engine shares a request with "
                f"{'it' if len(names) == 1 else 'them'}"
            )
            lone_engines.append(LoneEngines(names, f"{text}: {shown}", have_model=bool(near)))
            yield
    return lone_engines


def lone_kinds_in_steps(
    registry: Registry, unmet: Mapping[InstanceId, Set[InstanceId]]
) -> Generator[None, None, Mapping[Role, tuple[ByKind, ByKind]]]:
    """Sort engines that may serve, in steps of a millisecond or so; return all of each role, and
    those that no engine of the other role fits: none where that has no engine.

    ``unmet``: by decode engine, prefill engines that it cannot meet, beside those of its facts.
    """
    members = registry.members()
    prefills = list[Member]()
    decodes = list[Member]()
    kinds = EngineKinds()
    for number, member in enumerate(members):
        if number % _AT_ONCE == 0:
            yield
        if member.as_role(Role.DECODE) is not None and member.life.state in SERVING:
            facts = member.facts
            if member.instance.id in unmet:
                avoided = frozenset([*unmet[member.instance.id], *(facts.resting or ())])
                facts = replace(facts, resting=avoided)
            kinds.add_decode(len(decodes), facts)
            decodes.append(member)
    for number, member in enumerate(members):
        if number % _AT_ONCE == 0:
            yield
        if member.as_role(Role.PREFILL) is not None and member.life.state in SERVING:
            kinds.add_prefill(len(prefills), member.instance.id, member.facts)
            prefills.append(member)
    fitting = kinds.fitting()
    paired = {kind for _, some in fitting for kind in some}
    alone = [kind for kind, some in fitting if prefills and not some]
    return {
        Role.PREFILL: (
            _by_kind(prefills, kinds.prefills),
            _by_kind(prefills, [kind for kind in kinds.prefills if decodes and kind not in paired]),
        ),
        Role.DECODE: (
            _by_kind(decodes, [kind for kind, _ in fitting]),
            _by_kind(decodes, alone),
        ),
    }


def _by_kind(
    members: Sequence[Member], kinds: Sequence[PrefillKind] | Sequence[DecodeKind]
) -> ByKind:
    return [[members[place] for place in kind.places] for kind in kinds]


def _why_apart(
    registry: Registry, history: PairHistory, role: Role, member: Member, partner: Member
) -> str:
    """Say why an engine of a role shares no request with another one, which is there."""
    prefill, decode = (member, partner) if role is Role.PREFILL else (partner, member)
    if not fit(prefill.facts, decode.facts):
        if reasons := differences(partner.facts, member.facts):
            return ", ".join(reasons)
        return f"{decode.instance.id} has refused the KV cache of {prefill.instance.id}, and its log says why"
    pair = prefill.instance.id, decode.instance.id
    loads_none = f"{decode.instance.id} loads no KV of {prefill.instance.id}"
    if (trouble := registry.troubles.get(pair)) is not None:
        return f"{loads_none}: {trouble.why or trouble.reason}"
    reason = history.reason(pair)
    return loads_none if reason is None else f"{loads_none}: {reason}"
