"""What became of pairs of engines, and what follows from it: the place of a feature that remembers
it.

Classes, because a compiled call of a Protocol is slow. No call may wait or raise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdrelay_proxy.core.model import Instance, InstanceId, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.request_record import RequestRecord

Pair: TypeAlias = tuple[InstanceId, InstanceId]  # the prefill engine, and the decode engine
_PULL: Final = TransferMode.PULL


@dataclass(frozen=True, slots=True)
class PairTrouble:
    """Why a decode engine loads no KV of a prefill engine, as it shows it now."""

    reason: str  # a word
    why: str  # a sentence; empty: it has none
    lasts: bool  # it does not mend itself


class PairHistory:
    """Without a feature nothing is remembered: all pairs of engines that fit are alike.

    A pair that must not be used for a while is a fact of its decode engine, whoever finds that out:
    ``EngineCapabilities.resting``. So is a trouble that its decode engine shows:
    ``Registry.troubles``.
    """

    # ---- what requests ask

    @property
    def trial_at(self) -> float:
        """When the next request is to try a pair that rests, in seconds of the registry's clock."""
        return math.inf

    def pair_to_try(
        self,
        _prefill: Sequence[Instance],
        _decode: Sequence[Instance],
        _hints: RoutingHints,
        /,
        *,
        now: float,
        counts: bool,
    ) -> tuple[Instance, Instance] | None:
        """Return two of these engines that rest as a pair, and which this request is to try.

        ``counts``: the request follows.
        """
        del now, counts
        return None

    def reader_to_try(
        self, _lender: Instance, _decode: Sequence[Instance], /, *, now: float
    ) -> Instance | None:
        """Return the decode engine that is to try to read from one that a stream leaves."""
        del now
        return None

    def mode(self, _pair: Pair, /, *, now: float, counts: bool) -> TransferMode:
        """Return how the KV of a pair that can pull and push moves next; ``counts``: it will."""
        del now, counts
        return _PULL

    # ---- what it is told

    def failed(self, _pair: Pair, _failure: Failure, _now: float, /) -> None:
        """A decode leg has failed whose prefill engine had answered."""

    def blamed(self, _record: RequestRecord, _decode: InstanceId, /, *, now: float) -> None:
        """Other engines have answered well what a decode engine of the same request had failed."""

    # ---- what pages show

    def reason(self, _pair: Pair, /) -> str | None:
        """Return why the transfers of a pair fail, in a word; None: they do not."""
        return None

    def resting(self) -> Sequence[tuple[Pair, str]]:
        """List the pairs that get no requests, and why, in a word."""
        return ()
