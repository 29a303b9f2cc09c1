"""What the status page shows of the roles of engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolesPart:
    """The latest decision. ``None``: not known."""

    mode: str
    verdict: str
    why: str
    ago_s: float
    prefill: int  # engines that serve
    decode: int
    prefill_busy: float | None  # of them, by the traffic
    decode_busy: float | None
    wanted_prefill: int | None
    wanted_decode: int | None
    turns: int  # in the last hour
    turns_most: int
    last_turn: str  # the last one, in words; empty: there was none
    last_turn_ago_s: float | None
