"""What our connector shows of an engine's transfers with each other engine: how many have failed,
why, and how much KV moved.
"""

import re
from collections.abc import Mapping
from enum import auto
from typing import Final, TypeAlias

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.core.fleet.engine_metrics import TRUE, metric_lines
from pdrelay_proxy.core.fleet.pair_history import PairTrouble

_LOADS: Final = b"vllm:pdrelay_peer_loads_total"
_LOADS_LINE: Final = re.compile(
    rb"vllm:pdrelay_peer_loads_total\{(?P<labels>[^\n]{0,2000})\} "
    rb"(?P<value>[0-9]{1,18}(?:\.[0-9]{1,6})?(?:[eE]\+?[0-9]{1,2})?)"
)
_LOADS_LABEL: Final = re.compile(rb'(?:^|,)(engine|peer|outcome)="([0-9A-Za-z_.:-]{1,160})"(?=,|$)')
_FAILURE: Final = b"vllm:pdrelay_peer_failure"
# The reason is the connector's sentence, without what the text format escapes. It stands behind any
# other label.
_FAILURE_LABEL: Final = re.compile(
    rb'(?:^|,)(engine|peer|outcome|reason)="((?:(?<=reason=")[ '
    rb'!#-\[\]-~]{1,400})|(?:[0-9A-Za-z_.:-]{1,160}))"(?=,|$)'
)
_MOST: Final = 512  # lines of one engine; the connector shows 64 peers of each rank
_BYTES: Final = b"vllm:pdrelay_peer_bytes_total"
_SECONDS: Final = b"vllm:pdrelay_peer_transfer_seconds_total"
_MOVED_LINE: Final = re.compile(
    rb"[^{\n]{1,64}\{(?P<labels>[^\n]{0,2000})\} "
    rb"(?P<value>[0-9]{1,18}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?)"
)
_MOVED_LABEL: Final = re.compile(rb'(?:^|,)(engine|peer)="([0-9A-Za-z_.:-]{1,160})"(?=,|$)')

# by the prefill engine's id and the outcome; since the engine began
Totals: TypeAlias = Mapping[tuple[str, str], int]
# by the other engine's id: bytes and seconds since the start
Moved: TypeAlias = Mapping[str, tuple[float, float]]


class PairFailure(FastStrEnum):
    """Why a decode engine did not get a prefill engine's KV, as metrics and pages name it."""

    HANDSHAKE = auto()  # it could not connect
    REFUSED = auto()  # one of them refuses the other, for a reason that has no name here
    SECRET = auto()  # one has another shared secret than the other, or none
    CERTIFICATE = auto()
    VERSION = auto()  # of vLLM, or of the connector's protocol
    MODEL = auto()  # they serve different models, or store KV in different ways
    CLOCK = auto()  # they differ by more than signed parameters allow
    TRANSFER = auto()  # NIXL or the network failed
    TIMEOUT = auto()
    ENGINE_ERROR = auto()  # its leg ended with 5xx, and another pair served the same request
    LEASE = auto()  # the prefill engine had freed the blocks
    PEER_LOST = auto()  # the prefill engine's connection closed
    STAGING = auto()  # host memory was too small, or copying failed
    WRONG_KV = auto()  # it got other KV than the prefill engine had: by checksums


# Those that do not mend themselves: an operator reads each in the log as soon as a decode engine
# shows it.
LASTING: Final = frozenset(
    {
        PairFailure.HANDSHAKE,
        PairFailure.REFUSED,
        PairFailure.SECRET,
        PairFailure.CERTIFICATE,
        PairFailure.VERSION,
        PairFailure.MODEL,
        PairFailure.CLOCK,
    }
)
FAILURES_BY_NAME: Final = {reason.value: reason for reason in PairFailure}


def read_totals(text: bytes, rank: int | None = None) -> Totals:
    """Read the loads that an engine shows, or one of its data-parallel ranks; a label of another
    form is left out.
    """
    totals = dict[tuple[str, str], int]()
    for line in metric_lines(text, _LOADS, _LOADS_LINE, _MOST):
        labels = _own_labels(line, _LOADS_LABEL, rank)
        peer = labels.get(b"peer")
        outcome = labels.get(b"outcome")
        if peer is not None and outcome is not None:
            key = peer, outcome
            totals[key] = totals.get(key, 0) + int(float(line["value"]))
    return totals


def read_failures(text: bytes, rank: int | None = None) -> Mapping[str, PairTrouble]:
    """Read why loads fail now, as an engine shows it by the prefill engine's id, or one of its
    data-parallel ranks.
    """
    troubles = dict[str, PairTrouble]()
    for line in metric_lines(text, _FAILURE, most=_MOST):
        if line["value"] not in TRUE:
            continue
        labels = _own_labels(line, _FAILURE_LABEL, rank)
        peer = labels.get(b"peer")
        reason = FAILURES_BY_NAME.get(labels.get(b"outcome", ""))
        if peer is not None and reason is not None:
            why = labels.get(b"reason", "")
            troubles[peer] = PairTrouble(reason.value, why, reason in LASTING)
    return troubles


def read_moved(text: bytes, rank: int | None = None) -> Moved:
    """Read what an engine has moved, or one of its data-parallel ranks; a label of another form is
    left out.
    """
    moved = _values(text, _BYTES, rank)
    seconds = _values(text, _SECONDS, rank)
    return {peer: (count, seconds[peer]) for peer, count in moved.items() if peer in seconds}


def _values(text: bytes, name: bytes, rank: int | None) -> dict[str, float]:
    values = dict[str, float]()
    for line in metric_lines(text, name, _MOVED_LINE, _MOST):
        peer = _own_labels(line, _MOVED_LABEL, rank).get(b"peer")
        if peer is not None:
            values[peer] = values.get(peer, 0.0) + float(line["value"])
    return values


def _own_labels(
    line: re.Match[bytes], label: re.Pattern[bytes], rank: int | None
) -> dict[bytes, str]:
    """Return the labels of a line; none of one that is another data-parallel rank's."""
    labels = {name: value.decode() for name, value in label.findall(line["labels"])}
    engine = labels.get(b"engine")
    return labels if rank is None or engine is None or engine == str(rank) else {}
