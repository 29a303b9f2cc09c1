"""What the router reads in an engine's /metrics: whose connector it has, what it keeps, and what it
got.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# sum() of floats fails where this is compiled: mypyc takes its result for an int
from math import fsum
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.protocol.push import EngineMode

_LEASES: Final = b"vllm:pdrelay_leases_held"
_KEPT: Final = re.compile(
    rb"[a-z_:]{1,64}(?:\{(?P<labels>[^\n]*)\})? (?P<value>[0-9.eE+-]{1,32})[^\n]*"
)
_INFO: Final = b"vllm:pdrelay_connector_info"
_LABEL: Final = re.compile(
    rb'(?:^|,)(protocol|fingerprint|mode|engine_id|kv_role)="([0-9A-Za-z_.:-]{1,128})"'
)
_MODES: Final[Mapping[str, EngineMode]] = {mode.value: mode for mode in EngineMode}
_REFUSED: Final = b"vllm:pdrelay_incompatible_peer"
_PEER: Final = re.compile(rb'(?:^|,)peer="([0-9A-Za-z_.:-]{1,128}?)(?:_dp[0-9]{1,6})?"')
_STARTED: Final = b"process_start_time_seconds"
_STARTED_LINE: Final = re.compile(rb"[a-z_]{1,64} ([0-9.eE+]{1,32})")
# By how their lines begin. Ours may show those of the other, too.
_CONNECTORS: Final = {"pdrelay": b"vllm:pdrelay_", "nixl": b"vllm:nixl_"}
# Its own prefix cache counts as well: what is there need not be sent.
_SOURCES: Final = b"vllm:prompt_tokens_by_source_total"
_RECEIVED: Final = re.compile(rb'(?:^|,)source="(?:external_kv_transfer|local_cache_hit)"')
_LABELLED: Final = re.compile(
    rb"[a-z_:]{1,64}\{(?P<labels>[^\n]{0,2000})\} (?P<value>[0-9.eE+]{1,32})"
)
TRUE: Final = (b"1", b"1.0")  # the values of an info metric
_MOST_LINES: Final = 4096  # of one metric
# Of vllm/v1/metrics/loggers.py.
_RUNNING: Final = b"vllm:num_requests_running"
_WAITING: Final = b"vllm:num_requests_waiting"
_USAGE: Final = b"vllm:kv_cache_usage_perc"
_PREEMPTED: Final = b"vllm:num_preemptions_total"
_VALUE: Final = re.compile(
    rb"vllm:[a-z_]{1,40}(?:\{(?P<labels>[^\n]{0,2000})\})? "
    rb"(?P<value>[0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)"
)
_RANK: Final = re.compile(rb'(?:^|,)engine="([0-9]{1,6})"')


@dataclass(frozen=True, slots=True)
class Numbers:
    """What an engine shows; None: it does not."""

    facts: EngineCapabilities  # whose connector it has, and what that says
    leases: float | None = None  # requests whose blocks our connector keeps
    # share of its KV cache in use; blocks that are only cached are not
    kv_usage: float | None = None

    @property
    def kept(self) -> float | None:
        """Return something above 0 while it keeps something: leases if it counts them, else the use
        of its cache.
        """
        return self.kv_usage if self.leases is None else self.leases


def read(text: bytes, rank: int | None = None) -> Numbers:
    """Read the Prometheus text of an engine, or of one of its data-parallel ranks."""
    leases, usage = (_kept_values(text, name, rank) for name in (_LEASES, _USAGE))
    ours = next(_true_labels(text, _INFO, rank), b"")
    info = {name.decode(): value.decode() for name, value in _LABEL.findall(ours)}
    connectors = [
        name for name, line in _CONNECTORS.items() if text.startswith(line) or b"\n" + line in text
    ]
    facts = EngineCapabilities(
        connector=connectors[0] if connectors else None,
        mode=_MODES.get(info.get("mode", "")),
        protocol=info.get("protocol"),
        fingerprint=info.get("fingerprint"),
        engine_id=info.get("engine_id"),
        kv_role=info.get("kv_role"),
        started=started(text),
    )
    return Numbers(facts, sum(leases) if leases else None, max(usage) if usage else None)


def started(text: bytes) -> str | None:
    """Read when an engine's process began, as it writes it; None: it does not."""
    line = next(metric_lines(text, _STARTED, _STARTED_LINE), None)
    return None if line is None else line[1].decode()


def incompatible_peers(text: bytes, rank: int | None = None) -> frozenset[str]:
    """Read the engine ids of the prefill engines that a decode engine cannot load from."""
    refused = _true_labels(text, _REFUSED, rank)
    return frozenset(peer[1].decode() for labels in refused if (peer := _PEER.search(labels)))


@dataclass(frozen=True, slots=True)
class ShownLoad:
    """How busy an engine was, whoever has sent the requests."""

    at: float  # seconds of the registry's clock
    requests: int  # running and waiting
    kv_usage: float | None  # share of its KV cache in use; None: it does not show it
    preempted: float = 0.0  # requests since it started, for want of KV blocks


def shown_load(text: bytes, *, now: float) -> ShownLoad | None:
    """Read how busy an engine is, with all its ranks; None: it does not show its requests."""
    running, waiting = (metric_values(text, name) for name in (_RUNNING, _WAITING))
    if not running:
        return None
    usage = metric_values(text, _USAGE)
    requests = int(min(1e9, fsum([*running, *waiting])))
    preempted = fsum(metric_values(text, _PREEMPTED))
    return ShownLoad(now, requests, min(1.0, max(0.0, max(usage))) if usage else None, preempted)


def metric_lines(
    text: bytes, name: bytes, line: re.Pattern[bytes] = _LABELLED, most: int = _MOST_LINES
) -> Iterator[re.Match[bytes]]:
    """Find the lines of a metric: ``most`` are looked at, and those that ``line`` fits are found.

    They are searched for as bytes, and each is matched once: a pattern that is searched for is
    tried at every place, and with a text of one line that repeats its beginning that takes minutes,
    on the event loop.
    """
    follows = b"\n" + name
    at = 0 if text.startswith(name) else text.find(follows) + 1 or -1
    for _ in range(most):
        if at < 0:
            return
        end = text.find(b"\n", at)
        is_whole = text[at + len(name) : at + len(name) + 1] in (b"{", b" ")  # others begin alike
        matched = line.fullmatch(text[at : end if end >= 0 else len(text)]) if is_whole else None
        if matched is not None:
            yield matched
        at = text.find(follows, at) + 1 or -1


def metric_values(text: bytes, name: bytes) -> list[float]:
    """Read the values of a gauge or a counter, but for those that are no finite numbers."""
    return [float(line["value"]) for line in metric_lines(text, name, _VALUE)]


def _kept_values(text: bytes, name: bytes, rank: int | None) -> list[float]:
    """Read what shows that something is kept; a number that is none does so, too."""
    lines = metric_lines(text, name, _KEPT)
    return [_number(line, otherwise=1.0) for line in lines if is_of_rank(line, rank)]


def _true_labels(text: bytes, name: bytes, rank: int | None) -> Iterator[bytes]:
    """Find the labels of the lines of a metric that are 1."""
    for line in metric_lines(text, name):
        if line["value"] in TRUE and is_of_rank(line, rank):
            yield line["labels"]


def _number(line: re.Match[bytes], *, otherwise: float) -> float:
    try:
        return float(line["value"])
    except ValueError:
        return otherwise


def is_of_rank(line: re.Match[bytes], rank: int | None) -> bool:
    """Tell whether a line is one of a data-parallel rank's, or of no certain rank; None: of any."""
    engine = _RANK.search(line["labels"] or b"")
    return rank is None or engine is None or int(engine[1]) == rank


def received(exposition: bytes, rank: int | None = None) -> float | None:
    """Read how many prompt tokens an engine, or one of its ranks, did not compute."""
    values = [
        _number(line, otherwise=0.0)
        for line in metric_lines(exposition, _SOURCES)
        if _RECEIVED.search(line["labels"]) is not None and is_of_rank(line, rank)
    ]
    return sum(values) if values else None
