"""The engine that a stream leaves: as the decode engine that has it, and as the lender of KV."""

from pdrelay_proxy.core.fleet.member import KV_BOTH, Member
from pdrelay_proxy.core.model import Instance, Role


def as_lender(member: Member) -> Instance | None:
    """Return the engine as the prefill engine of what it has in its prefix cache; None: it is not
    asked for that.

    It does not hand KV over (``kv_consumer``), does not answer its probes, or is several ranks
    behind one address, of which another one would get the request.
    """
    facts = member.facts
    life = member.life
    hides_ranks = (
        facts.connector is not None and facts.engine_id is None and member.instance.rank is None
    )
    if facts.kv_role not in (None, KV_BOTH) or life.misses or life.is_away or hides_ranks:
        return None
    return member.in_role(Role.PREFILL)


def as_stream_source(member: Member) -> Instance:
    """Return the engine as the decode engine of a stream that it has, or had: it may have turned
    since.
    """
    return member.in_role(Role.DECODE)
