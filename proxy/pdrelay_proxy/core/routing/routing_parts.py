"""What a feature adds to the choice of engines."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.model import Instance, RoutingHints
from pdrelay_proxy.core.routing.cache_reports import CacheReports
from pdrelay_proxy.core.routing.leg_listener import LegListener
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.core.routing.pairing import WeighingPolicy
from pdrelay_proxy.core.routing.policy_parts import PolicyParts
from pdrelay_proxy.core.routing.prompt_id_reader import PromptIdReader

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Weighing:
    """What it would take engines to serve a request, for the choice among them."""

    # Measures legs. It notes what engines are sent, once it has looked at what they have
    # (PromptMatches.sent).
    listener: LegListener
    # Tells whether a decode engine may compute a prompt alone, for the sake of its streams; None:
    # nobody wants to know.
    spares: Callable[[Instance, RoutingHints], bool] | None
    # chooses both engines; None: the policies of the two legs do
    policy: WeighingPolicy | None = None


@dataclass(frozen=True, slots=True)
class RoutingParts:
    """All of it; each may be left out."""

    # what engines tell of their caches; only one feature may have it
    reports: CacheReports | None = None
    id_reader: PromptIdReader | None = None  # has prefill engines tell the ids of prompts; likewise
    # of each leg, behind what policies that go by caches learn themselves
    listeners: Sequence[LegListener] = ()
    policies: Sequence[str] = ()  # names of policies for both legs, which go by caches
    # Returns what the settings want to be weighed; only one feature may. Raises ConfigError.
    weigh: Callable[[PolicyParts], Weighing | None] = lambda _: None
    preference: PairPreference | None = None  # among engines that fit; only one feature may have it
    pair_history: PairHistory | None = None  # of engines that fit; only one feature may have it


def merged(parts: Sequence[RoutingParts]) -> RoutingParts:
    """Return what several features add together."""
    return RoutingParts(
        reports=first_added(part.reports for part in parts),
        id_reader=first_added(part.id_reader for part in parts),
        listeners=[listener for part in parts for listener in part.listeners],
        policies=[name for part in parts for name in part.policies],
        weigh=lambda policy_parts: first_added(part.weigh(policy_parts) for part in parts),
        preference=first_added(part.preference for part in parts),
        pair_history=first_added(part.pair_history for part in parts),
    )


def first_added(parts: Iterable[_T | None]) -> _T | None:
    """Return what the first feature adds that adds something, where only one can."""
    return next((part for part in parts if part is not None), None)
