"""Engines that share no request with any engine of the other role, and why: each of them looks
healthy.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import compared, differences, fit, have_common_model
from pdrelay_proxy.core.fleet.health import SERVING
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.named_engines import listed
from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId, Role

_AT_ONCE: Final = 500  # engines
_REASONS_MOST: Final = 3  # that are said: in a rollout of many revisions there are many

# the prefill engines with which a decode engine cannot meet
AvoidedBy = Callable[[Member], frozenset[InstanceId]]


@dataclass(frozen=True, slots=True)
class LoneKinds:
    """Engines by kind: those of a kind fit the same engines."""

    all: Mapping[Role, Sequence[Sequence[Member]]]
    # none of the other role fits; empty where that has no engine
    lone: Mapping[Role, Sequence[Sequence[Member]]]


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

    def avoided(decode: Member) -> frozenset[InstanceId]:
        return (decode.facts.resting or frozenset()) | unmet.get(decode.instance.id, set())

    kinds = yield from lone_kinds_in_steps(registry, avoided)
    lone_engines = list[LoneEngines]()
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        for kind in kinds.lone[role]:
            names = [member.instance.id for member in kind]
            partners = [partner_kind[0] for partner_kind in kinds.all[other]]
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


def lone_kinds_in_steps(registry: Registry, avoided: AvoidedBy) -> Generator[None, None, LoneKinds]:
    """Sort engines that may serve, in steps of a millisecond or so."""
    members = registry.members()
    decodes = dict[object, list[Member]]()
    for number, member in enumerate(members, start=1):
        if member.as_role(Role.DECODE) is not None and member.life.state in SERVING:
            facts = member.facts
            decodes.setdefault(
                (compared(facts), facts.incompatible, avoided(member) or None), []
            ).append(member)
        if number % _AT_ONCE == 0:
            yield
    refused = frozenset[str]().union(
        *(kind[0].facts.incompatible or () for kind in decodes.values())
    )
    unmet = frozenset[InstanceId]().union(*(avoided(kind[0]) for kind in decodes.values()))
    prefills = dict[object, list[Member]]()
    for number, member in enumerate(members, start=1):
        if member.as_role(Role.PREFILL) is not None and member.life.state in SERVING:
            facts = member.facts
            own = facts.engine_id if facts.engine_id in refused else None
            name = member.instance.id if member.instance.id in unmet else None
            prefills.setdefault((compared(facts), own, name), []).append(member)
        if number % _AT_ONCE == 0:
            yield
    kinds = {Role.PREFILL: [*prefills.values()], Role.DECODE: [*decodes.values()]}
    if not prefills or not decodes:
        return LoneKinds(kinds, dict.fromkeys(Role, ()))
    alone = list[list[Member]]()
    paired = set[object]()
    for decode in decodes.values():
        cannot_meet = avoided(decode[0])
        fitting = [
            key
            for key, prefill in prefills.items()
            if prefill[0].instance.id not in cannot_meet and fit(prefill[0].facts, decode[0].facts)
        ]
        paired.update(fitting)
        alone += [] if fitting else [decode]
        yield
    lone = [kind for key, kind in prefills.items() if key not in paired]
    return LoneKinds(kinds, {Role.PREFILL: lone, Role.DECODE: alone})


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
