"""Which engines of a role serve the model of a request, and why none does."""

from collections.abc import Sequence

from pdrelay_proxy.core.fleet.fleet_models import clipped
from pdrelay_proxy.core.fleet.named_engines import listed
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, Role, RoutingHints
from pdrelay_proxy.errors import BadRequest, NoInstance, UnknownModel


def serving(
    registry: Registry, role: Role, among: Sequence[Instance], hints: RoutingHints
) -> Sequence[Instance]:
    """List the engines of a role that serve the model of a request; raises as
    ``Candidates.narrowed``.

    Those that have not said yet what they serve come only where none is known to serve it: they may
    not know the model.
    """
    engines = [
        engine
        for engine in among
        if registry.facts(engine).serves(hints.model) and has_rank(engine, hints)
    ]
    if not engines:
        raise why_none(registry, role, hints)
    return [engine for engine in engines if registry.facts(engine).models is not None] or engines


def why_none(
    registry: Registry, role: Role, hints: RoutingHints
) -> UnknownModel | BadRequest | NoInstance:
    """Say why no engine of a role would do for a request."""
    members = [member for member in registry.members() if member.facts.serves(hints.model)]
    if not members:
        model = clipped(hints.model or "")
        return UnknownModel(
            f"the model {model!r} is not served here; there is {registry.models.listed()}"
        )
    members = [member for member in members if member.as_role(role) is not None]
    if not any(has_rank(member.instance, hints) for member in members):
        if hints.rank is not None and role is Role.DECODE:
            return BadRequest(
                f"X-data-parallel-rank is {hints.rank}, and no decode instance has this rank"
            )
        return NoInstance(f"no {role} instance serves the model {clipped(hints.model or '')!r}")
    states = [f"{member.instance.id} is {member.life.state}" for member in members]
    return NoInstance(f"no {role} instance that would do can take a request now: {listed(states)}")


def has_rank(instance: Instance, hints: RoutingHints) -> bool:
    """Look for the rank that a client wants: it means the engine that answers, so prefill engines
    have them all.
    """
    return (
        hints.rank is None or instance.rank in (None, hints.rank) or instance.role is Role.PREFILL
    )
