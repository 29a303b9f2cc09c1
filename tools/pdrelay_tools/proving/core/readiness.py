"""Decisions of ``pdrelay check``: which engines to pair, and whether KV moved by their counters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, fit
from pdrelay_proxy.core.fleet.fleet_models import first_of
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.peer_metrics import Moved
from pdrelay_proxy.core.model import Role

OURS: Final = "pdrelay"
_SHORTEST: Final = 128  # tokens of the prompt: a decode engine may count one less for each request
_WIDTH: Final = 8

MemberPair: TypeAlias = tuple[Member, Member]  # the prefill and the decode engine


class Sign(StrEnum):
    """The result in a line."""

    OK = "ok"
    FAILED = "FAILED"
    UNKNOWN = "unknown"  # no engine shows it, or the time was over first


@dataclass(frozen=True, slots=True)
class ReadinessLine:
    """One finding."""

    sign: Sign
    about: str  # an engine, or two
    text: str
    is_unfinished: bool = False  # the time was over first

    def __str__(self) -> str:
        return f"{self.sign:{_WIDTH}} {self.about}: {self.text}"


@dataclass(frozen=True, slots=True)
class KvCounters:
    """The counters of one engine since its start; None: it shows no such counter."""

    of_peers: Moved  # by the other engine's id, as our connector shows it
    moved_bytes: float | None  # with all others
    loaded_tokens: float | None  # of prompts, from other engines


@dataclass(frozen=True, slots=True)
class PairCounters:
    """The counters of both engines of a pair, before and after its request."""

    prefill_before: KvCounters
    prefill_now: KvCounters
    decode_before: KvCounters
    decode_now: KvCounters


def prompt_length(block_sizes: Sequence[int]) -> int:
    """Return the length of a prompt that fills at least two blocks at every engine."""
    return max([_SHORTEST, *(2 * size for size in block_sizes)])


def engine_line(member: Member, *, has_key: bool) -> ReadinessLine:
    """Describe an engine that answers."""
    facts = member.facts
    parts = [f"answers at {member.instance.address.url}"]
    parts += [f"vLLM {facts.version}"] if facts.version else []
    parts += [f"model {first_of(facts.bases or facts.models)}"] if facts.models else []
    parts += (
        [f"connector {facts.connector}"] if facts.connector else ["its metrics name no connector"]
    )
    parts += [f"kv_role {facts.kv_role}"] if facts.kv_role else ["its kv_role is not known"]
    parts += ["accepts the key"] if has_key else []
    return ReadinessLine(Sign.OK, member.instance.id, ", ".join(parts))


def choose_pairs(members: Sequence[Member]) -> Sequence[MemberPair]:
    """Choose pairs so that each engine that fits another one is in a pair; the least used first."""
    sides = {
        role: [candidate for candidate in members if candidate.instance.role is role]
        for role in Role
    }
    used: Counter[str] = Counter()
    pairs = list[MemberPair]()
    for role, other_role in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        for member in sides[role]:
            if used[member.instance.id]:
                continue
            fitting = [
                candidate for candidate in sides[other_role] if _fit(*_in_order(member, candidate))
            ]
            if not fitting:
                continue
            partner = min(fitting, key=lambda candidate: used[candidate.instance.id])
            used.update((member.instance.id, partner.instance.id))
            pairs.append(_in_order(member, partner))
    return pairs


def common_model(prefill: EngineCapabilities, decode: EngineCapabilities) -> str | None:
    """Return a name by which both engines serve their model; None: not known."""
    prefill_models = prefill.bases or prefill.models
    decode_models = decode.bases or decode.models
    return (
        min(prefill_models & decode_models, default=None)
        if prefill_models and decode_models
        else None
    )


def moved_between(
    pair: MemberPair, counted: PairCounters, *, tokens: int, requests: int
) -> str | None:
    """Describe the KV that moved between a pair; empty: none; None: neither engine counts it.

    ``requests``: how many requests of ``tokens`` each the decode engine got meanwhile, from all
    partners. Our connector counts bytes for each partner. Other connectors count the bytes of all
    partners, and vLLM the tokens that a decode engine loaded: then KV has moved if these are as
    many as those of all its requests.
    """
    prefill, decode = pair
    if OURS in (prefill.facts.connector, decode.facts.connector):
        own = _peer_bytes(counted.decode_now.of_peers, prefill.facts.engine_id)
        own += _peer_bytes(counted.prefill_now.of_peers, decode.facts.engine_id)
        own -= _peer_bytes(counted.decode_before.of_peers, prefill.facts.engine_id)
        own -= _peer_bytes(counted.prefill_before.of_peers, decode.facts.engine_id)
        return f"{own:,.0f} bytes" if own > 0 else ""
    totals = [
        _more(counted.decode_before.moved_bytes, counted.decode_now.moved_bytes),
        _more(counted.prefill_before.moved_bytes, counted.prefill_now.moved_bytes),
    ]
    shown = [total for total in totals if total is not None]
    loaded = _more(counted.decode_before.loaded_tokens, counted.decode_now.loaded_tokens)
    if loaded is not None:
        has_loaded = loaded > tokens * (requests - 1) and (not shown or sum(shown) > 0)
        return f"the KV of {loaded / requests:,.0f} tokens" if has_loaded else ""
    if shown:
        return f"{sum(shown):,.0f} bytes" if sum(shown) > 0 else ""
    return None


def failure_with(failures: Mapping[str, str], engine_id: str | None) -> str:
    """Return the reason that a decode engine shows for not loading KV of an engine; empty: none."""
    if engine_id is None:
        return ""
    return next((reason for peer, reason in failures.items() if _is_of(peer, engine_id)), "")


def verdict(lines: Sequence[ReadinessLine]) -> str:
    """Return the result of all findings as a sentence."""
    failed = sum(line.sign is Sign.FAILED for line in lines)
    unknown = sum(line.sign is Sign.UNKNOWN for line in lines)
    unfinished = sum(line.is_unfinished for line in lines)
    if failed:
        return f"Not ready: {failed} of {len(lines)} findings failed."
    if unfinished:
        return f"Not known: {unfinished} of {len(lines)} findings need more time."
    return (
        "Not known whether KV moves: see above."
        if unknown
        else "Ready: each engine exchanged KV with another one."
    )


def is_ready(lines: Sequence[ReadinessLine]) -> bool:
    """Tell whether every finding is OK; UNKNOWN is not."""
    return all(line.sign is Sign.OK for line in lines)


def _in_order(member: Member, partner: Member) -> MemberPair:
    return (member, partner) if member.instance.role is Role.PREFILL else (partner, member)


def _fit(prefill: Member, decode: Member) -> bool:
    return fit(prefill.facts, decode.facts)


def _peer_bytes(moved: Moved, engine_id: str | None) -> float:
    return sum(
        count
        for peer, (count, _) in moved.items()
        if engine_id is not None and _is_of(peer, engine_id)
    )


def _is_of(peer: str, engine_id: str) -> bool:
    """Tell whether a peer is an engine, or one of its data-parallel ranks."""
    return peer == engine_id or peer.startswith(f"{engine_id}_dp")


def _more(before: float | None, now: float | None) -> float | None:
    return None if now is None else now - (before or 0.0)
