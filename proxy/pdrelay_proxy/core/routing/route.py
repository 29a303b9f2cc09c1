"""Which engines serve a request, and how: the one decision behind requests, ``explain`` and
replays.
"""

from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.model import (
    Api,
    Instance,
    InstanceId,
    Role,
    RoutingHints,
    SingleEngineReason,
)
from pdrelay_proxy.core.protocol.disaggregation import may_share, solo_reason
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.raw_json import Fields
from pdrelay_proxy.core.routing.fleet_choice import FleetChoice
from pdrelay_proxy.core.routing.pairing import Chosen
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.core.schemas import Coordinates
from pdrelay_proxy.errors import NoInstance, NoMatchingInstance
from pdrelay_proxy.settings import Settings

_N: Final = SingleEngineReason.N
_SHORT: Final = SingleEngineReason.SHORT
_FASTER: Final = SingleEngineReason.FASTER
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_READ: Final = TransferMode.PULL


class Route:
    """The engines of a request, and what they were chosen by."""

    __slots__ = ("cached", "decode", "expected", "mode", "prefill", "reason", "why_no_match")

    def __init__(
        self, prefill: Instance | None, decode: Instance, reason: SingleEngineReason | None
    ) -> None:
        self.prefill = prefill  # None: the decode engine serves the request alone
        self.decode = decode
        self.reason = reason  # why it does; None: it does not
        self.why_no_match = ""  # which engines do not fit, if that is the reason
        self.mode: TransferMode | None = None  # for two engines that can do either
        # bytes of the prompt that the decode engine has, and of all of it
        self.cached: tuple[int, int] | None = None
        self.expected: ExpectedTime | None = None  # None: the policies do not ask for it


def split_reason(fleet: FleetChoice, api: Api, fields: Fields) -> SingleEngineReason | None:
    """Say why a request must not be split between two engines of this fleet; None: it may be."""
    reason = solo_reason(api, fields)
    if reason is _N and may_share(api, fields) and fleet.shares_loads():
        return None
    return reason


def route(
    fleet: FleetChoice,
    hints: RoutingHints,
    path: str,
    tries: RetryAttempts,
    settings: Settings,
    *,
    reason: SingleEngineReason | None,
) -> Route:
    """Choose the engines of a request; at a fleet whose choices count, this one does.

    ``reason``: why one engine must serve it, if something of the request itself says so
    (``split_reason``). Raises UnknownModel, BadRequest (no such rank), or NoInstance.
    """
    cached: tuple[int, int] | None = None
    expected: ExpectedTime | None = None
    why_no_match = ""
    if reason is None and (fleet.weighs or settings.min_split_new_bytes):
        reason, cached, expected = _small_reason(fleet, hints, tries, settings.min_split_new_bytes)
    if reason is None:
        try:
            prefill, decode = (
                fleet.any_pair(hints, may_be_alone=settings.decode_only_fallback)
                if not tries.avoided and path not in fleet.missing.denials
                else _pair_of_some(
                    fleet, hints, path, tries, may_be_alone=settings.decode_only_fallback
                )
            )
        except NoMatchingInstance as error:
            if not settings.decode_only_fallback:
                raise
            reason = SingleEngineReason.NO_MATCH
            why_no_match = str(error)
        except NoInstance:
            if not settings.decode_only_fallback:
                raise
            fleet.usable(_DECODE)  # raises NoInstance, if that is why
            reason = SingleEngineReason.NO_PREFILL
        else:
            chosen = Route(
                prefill, decode, SingleEngineReason.FEW_MATCH if prefill is None else None
            )
            chosen.cached = cached
            chosen.expected = fleet.pairs.take_expected(hints) if fleet.weighs else None
            if prefill is not None:
                chosen.mode = fleet.mode_of(prefill, decode)
            return chosen
    chosen = Route(None, choose_decode(fleet, hints, path, tries, fleet.usable(_DECODE)), reason)
    chosen.cached = cached
    chosen.why_no_match = why_no_match
    chosen.expected = fleet.pairs.take_expected(hints) or expected
    return chosen


def choose_decode(
    fleet: FleetChoice,
    hints: RoutingHints,
    path: str,
    tries: RetryAttempts,
    among: Sequence[Instance],
) -> Instance:
    """Choose the engine of a decode leg, or of a whole request; raises as ``route``."""
    if path in fleet.missing.denials:
        among = fleet.offering(path, among) or among
    among = tries.among(among)
    if tries.avoided:
        hints = hints.once_more()
        if tries.is_suspect:
            among = fleet.without_trials(among)
    return fleet.choose(among, hints)


def told_ahead(
    prefill: InstanceId, mode: TransferMode | None, learned: PushCoordinates, *, needs_model: bool
) -> Coordinates | None:
    """Return what the decode engine is told of the prefill engine, so that both legs go out at
    once; None: it waits for the prefill engine's answer.

    ``mode``: as in Route; ``needs_model``: that answer tells which model the decode engine must
    serve.
    """
    return None if needs_model or mode is _READ else learned.coordinates(prefill)


def _small_reason(
    fleet: FleetChoice, hints: RoutingHints, tries: RetryAttempts, least: int
) -> tuple[SingleEngineReason | None, tuple[int, int] | None, ExpectedTime | None]:
    """Say why so little of the prompt is new to a decode engine that it serves it alone; None: it
    does not.

    Say also what it has cached, and what is expected of it, as far as that was looked up.
    """
    if tries.avoided:
        reason, cached = fleet.pairs.small(tries.among(fleet.usable(_DECODE)), hints, least)
    else:
        reason, cached = fleet.any_small(hints, least)
    shown = (
        (cached, hints.blocks.size) if fleet.remembers and least and reason is not _SHORT else None
    )
    if reason is not None or not fleet.weighs:
        return reason, shown, None
    if not fleet.is_faster_alone(tries.among(fleet.usable(_DECODE)), hints):
        return None, shown, None
    expected = fleet.pairs.take_expected(hints)
    if expected is not None:
        shown = hints.blocks.size * expected.decode_hit // expected.tokens, hints.blocks.size
    return _FASTER, shown, expected


def _pair_of_some(
    fleet: FleetChoice, hints: RoutingHints, path: str, tries: RetryAttempts, *, may_be_alone: bool
) -> Chosen:
    """Choose as ``any_pair``, where some engines have failed this request, or lack the path."""
    if tries.avoided:
        hints = hints.once_more()
    decodes = _fresh(fleet, path, tries, _DECODE)
    prefills = _fresh(fleet, path, tries, _PREFILL)
    return fleet.pair(prefills, decodes, hints, may_be_alone=may_be_alone)


def _fresh(fleet: FleetChoice, path: str, tries: RetryAttempts, role: Role) -> Sequence[Instance]:
    """List the engines of a role that have not failed this request, if any, else all; raises
    NoInstance.

    One that waits for its trial gets no request that may be to blame for its failure.
    """
    usable = fleet.usable(role)
    if path in fleet.missing.denials:
        usable = fleet.offering(path, usable)
        if not usable:
            raise NoInstance(f"no {role} instance that can take a request now has {path}")
    among = tries.among(usable)
    return fleet.without_trials(among) if tries.is_suspect else among
