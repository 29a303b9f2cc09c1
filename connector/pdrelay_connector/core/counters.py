"""The connector's counters, gauges and transfer samples, for vLLM's stats and Prometheus."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pdrelay_connector.core.timeline import MAX_EVENTS, TimelineEvent, TimelineStep


class TransferSample(msgspec.Struct, frozen=True):
    """One completed transfer."""

    seconds: float
    bytes: int
    descriptors: int
    posting: float = 0.0  # s that handing it to NIXL took
    peer: str = ""  # id of the engine that it was read from or written to; "": not known


class StatsReport(msgspec.Struct):
    """Counts since the last report, present gauges, and engines found compatible or not."""

    counters: dict[str, int] = {}
    gauges: dict[str, float] = {}
    transfers: list[TransferSample] = []
    incompatible: list[str] = []  # ids
    # ids of engines that were found to differ before, and do not any more
    compatible: list[str] = []
    events: list[TimelineEvent] = []
    # by prefill engine, and by how they ended: LOAD_OUTCOMES
    peer_loads: dict[str, dict[str, int]] = {}
    # by prefill engine: how its latest failed load ended, one of FAILURES
    failures: dict[str, str] = {}

    def __bool__(self) -> bool:
        lasting = (
            self.counters or self.gauges or self.transfers or self.incompatible or self.compatible
        )
        return bool(lasting or self.events or self.peer_loads)  # failures come with their loads


@dataclass(slots=True)
class Counters:
    """Filled and emptied by one thread.

    ``keeps_events``: somebody can read the timelines of requests.
    """

    keeps_events: bool = False
    _counts: Counter[str] = field(default_factory=Counter[str])
    _transfers: list[TransferSample] = field(default_factory=list[TransferSample])
    _events: list[TimelineEvent] = field(default_factory=list[TimelineEvent])
    _peer_loads: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    _failures: dict[str, str] = field(default_factory=dict[str, str])

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter; ``name`` is one of :data:`COUNTERS`."""
        if by:  # a zero would send a report across processes
            self._counts[name] += by

    def count_load(self, name: str, engine: str, *, cause: str = "") -> None:
        """Count the end of a load, also by its prefill engine, so that routers avoid bad pairs.

        ``cause``: why the two engines are not connected, one of :data:`CAUSES`.
        """
        outcome = LOAD_OUTCOMES.get(name)
        if outcome is not None:
            is_unmet = outcome in (UNREACHABLE, "refused")
            self.count_peer_load(cause if cause and is_unmet else outcome, engine)
        self.count(name)

    def count_peer_load(self, outcome: str, engine: str) -> None:
        """Count the same by the prefill engine alone."""
        if outcome != LOADED:
            self._failures[engine] = outcome
        by_outcome = self._peer_loads.setdefault(engine, {})
        by_outcome[outcome] = by_outcome.get(outcome, 0) + 1

    def observe(self, sample: TransferSample) -> None:
        """Record one finished transfer."""
        self._transfers.append(sample)

    def note(
        self, request: str, step: TimelineStep, at: float, count: int = 0, *, note: str = ""
    ) -> None:
        """Note an event of a request's timeline, if those are kept; ``at``: s, monotonic."""
        if self.keeps_events:
            self._events.append(TimelineEvent(request, step, at, count, note))

    @property
    def has_any(self) -> bool:
        """Whether something was counted or noted since the last ``take``."""
        return bool(self._counts or self._transfers or self._events or self._peer_loads)

    def take_report(self) -> StatsReport:
        """Return what was counted and noted since the last call, and start again at zero."""
        report = StatsReport(
            counters=dict(self._counts),
            transfers=self._transfers,
            events=self._events,
            peer_loads=self._peer_loads,
            failures=self._failures,
        )
        self._counts = Counter()
        self._transfers = []
        self._events = []
        self._peer_loads = {}
        self._failures = {}
        return report


class ForwardingCounters(Counters):
    """Forwards each count at once, on the thread that counts.

    vLLM collects the workers' numbers with an engine step, and a message of this thread may cause
    the last step for a while: what is counted after that step would wait for the next request.
    """

    def __init__(
        self, forward: Callable[[StatsReport], None], *, keeps_events: bool = False
    ) -> None:
        super().__init__(keeps_events)
        self._forward = forward

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        super().count(name, by)
        self._forward(self.take_report())

    def observe(self, sample: TransferSample) -> None:
        """Record one finished transfer."""
        super().observe(sample)
        self._forward(self.take_report())

    def note(
        self, request: str, step: TimelineStep, at: float, count: int = 0, *, note: str = ""
    ) -> None:
        """Note an event."""
        if self.keeps_events:
            super().note(request, step, at, count, note=note)
            self._forward(self.take_report())


LOADED: Final = "loaded"
UNREACHABLE: Final = "handshake"
SECRET: Final = "secret"
CLOCK: Final = "clock"
# Why two engines have not met, where it is known; of a load, in the place of "handshake" or
# "refused".
CAUSES: Final = (UNREACHABLE, "refused", SECRET, "certificate", "version", "model", CLOCK)
# How a load has ended, by the counter of it. An aborted load says nothing of its engines. In pull
# each rank counts its failures, and the scheduler counts a request that all ranks have loaded.
LOAD_OUTCOMES: Final = {
    "loads": LOADED,
    "loads_failed_handshake": "handshake",
    "loads_skipped_incompatible": "refused",
    "loads_failed_transfer": "transfer",
    "loads_failed_timeout": "timeout",
    "loads_failed_lease": "lease",
    "loads_failed_peer": "peer_lost",
    "loads_failed_staging": "staging",
    "loads_failed_wrong_kv": "wrong_kv",
}
# What each means, for a label: the words are few and fixed, so that no peer and no client adds
# series. A log has more.
FAILURES: Final = {
    UNREACHABLE: "the side channel of the prefill engine could not be connected to",
    "refused": "one engine refuses the other",
    SECRET: "another PDRELAY_CONNECTOR_SECRET, or one engine has none",
    "certificate": "one engine does not accept the other's TLS certificate",
    "version": "another version of vLLM, or of the connector's protocol",
    "model": "another model, other weights of it, or another way to store its KV",
    CLOCK: "the clocks of the two engines differ too much",
    "transfer": "NIXL or the network failed",
    "timeout": "it took longer than transfer_timeout or registration_timeout",
    "lease": "the prefill engine had freed the blocks",
    "peer_lost": "the connection of the prefill engine closed",
    "staging": "host memory was too small, or copying to or from it failed",
    "wrong_kv": "a sampled block was not what the prefill engine had computed",
}
EVENTS_DROPPED = "timeline_events_dropped"
COUNTERS = {
    "leases_granted": "Prefills whose blocks were kept for a decode engine.",
    "leases_renewed": "Renewals received for leases that were held.",
    "leases_done": "Leases that ended because every decode rank had read its blocks.",
    "leases_dropped": "Leases that ended because the decode engine did not want the blocks.",
    "leases_peer_lost": "Leases that ended because the decode engine's connection closed.",
    "leases_expired": "Leases that were not renewed in time.",
    "leases_revoked": "Leases that ended unread because a prefill lacked blocks.",
    "leases_refused": (
        "Prefills not handed over because max_leases or max_held_share was reached, or their id "
        "cannot name a lease."
    ),
    "prefills_spoilt": (
        "Prefills not handed over because another connector could not load blocks of theirs."
    ),
    "objections": (
        "Decode engines that have met this one and load no KV of it, because a fingerprint or "
        "shape differs."
    ),
    "foreign_messages": (
        "Messages about leases, reads and pushes of another engine; they changed nothing."
    ),
    "connections_refused": (
        "Side channel connections refused: no proof of the secret, or another engine expected."
    ),
    "connections_without_tls": "Side channel connections that did not complete TLS.",
    "connections_timed_out": "Side channel connections that did not prove themselves in time.",
    "connections_evicted": (
        "Side channel connections closed because too many had not proven themselves."
    ),
    "connections_over_record_limit": (
        "Side channel connections closed: many TLS records and no proof."
    ),
    "accepts_without_descriptor": (
        "Times that a connection was not accepted for lack of file descriptors."
    ),
    "unknown_transfer_messages": (
        "Messages about leases, reads and pushes that are over, or unknown."
    ),
    "early_transfer_messages": (
        "Push: messages of decode engines about transfers whose prefill is not done."
    ),
    "registrations": "Push: requests for which decode engines lent blocks to write into.",
    "pushes": "Push: requests whose KV was written completely, counted on each rank.",
    "pushes_aborted": "Push: requests whose KV was not written completely, counted on each rank.",
    "pushes_refused": "Push: registrations refused: too many, or too many blocks.",
    "transfers_abandoned": (
        "Prefills whose client left before the router had their answer: their blocks are freed."
    ),
    "transfer_ids_duplicate": (
        "Push: prefills not handed over because another has the same transfer id."
    ),
    "transfer_ids_invalid": (
        "Push: prefills not handed over because their transfer id could not be used."
    ),
    "reads_discarded": "Reads and pushes that ended after their lease: their bytes were discarded.",
    "renewals_sent": "Leases renewed at prefill engines, one per request and heartbeat.",
    "registrations_sent": "Push: requests for which blocks were lent to prefill engines.",
    "registrations_resent": (
        "Push: registrations sent over a new connection because the one before had ended."
    ),
    "renewals_withheld": (
        "Leases not renewed because this engine's loop had not turned for engine_loop_timeout."
    ),
    "drops_sent": "Requests whose blocks were given back unread.",
    "leases_lost": "Leases that a prefill engine does not hold, or not for this engine.",
    "loads_skipped_lease_lost": (
        "Requests that computed their own prompt because their lease was lost before the read."
    ),
    "handshakes": "Prefill engines connected to.",
    "handshakes_failed": "Prefill engines that could not be connected to.",
    "peers_lost": "Prefill engines whose connection closed.",
    "loads": "Requests whose KV was loaded and confirmed.",
    "loads_failed_handshake": (
        "Loads that failed because the prefill engine could not be connected to."
    ),
    "loads_failed_transfer": "Loads that failed in NIXL or the network.",
    "loads_failed_timeout": "Loads that took longer than transfer_timeout.",
    "loads_failed_lease": "Loads that failed because the lease was lost before the read ended.",
    "loads_failed_peer": "Loads that failed because the prefill engine's connection closed.",
    "loads_failed_staging": (
        "Loads that failed because host memory was too small, or copying to or from it failed."
    ),
    "loads_failed_wrong_kv": (
        "Loads that failed because a sampled block was not what the prefill engine computed."
    ),
    "prefills_sampled": (
        "Prefills of which checksums of sampled blocks were ordered (verify_share)."
    ),
    "sums_late": (
        "Sampled prefills whose readers were answered without checksums: a step of the workers "
        "took too long."
    ),
    "blocks_checked": (
        "Loaded blocks whose checksum was compared with the prefill engine's, counted on each rank."
    ),
    "blocks_wrong": (
        "Loaded blocks whose checksum differed from the prefill engine's, counted on each rank."
    ),
    "loads_unchecked": (
        "Loads with checksums of which no block could be compared: other shapes, or not loaded."
    ),
    "transfers_retried": (
        "Reads and writes that had failed and were posted again, over another connection or "
        "another backend of NIXL."
    ),
    "connections_replaced": (
        "Broken connections of NIXL to engines that live, which were closed and opened again."
    ),
    "backends_rebuilt": "Times that NIXL's backend was broken and another was built in its place.",
    "backends_not_rebuilt": "Times that NIXL's backend was broken and NIXL could build no other.",
    "backends_given_up": (
        "Times that NIXL's backend counted as failed because others did not help either."
    ),
    "transfer_thread_stuck": (
        "Times that a call of NIXL had not returned after transfer_timeout: loads fail until it does."
    ),
    "bytes_staged_out": "Bytes of KV copied from the device into host memory.",
    "bytes_staged_in": "Bytes of KV copied from host memory into the device.",
    "loads_aborted": "Push: requests aborted before their KV was there.",
    "loads_skipped_incompatible": (
        "Requests that computed their own prompt because their prefill engine differs."
    ),
    "loads_shared": "Requests that wait for the load of another answer to the same prompt (n > 1).",
    "loads_skipped_local": (
        "Transfers not needed: the prompt was in the local prefix cache, or is one token."
    ),
    "requests_without_kv_params": (
        "Requests without kv_transfer_params on an engine that may load KV."
    ),
    "kv_params_invalid": "Requests whose kv_transfer_params could not be used.",
    "kv_params_other_prompt": "Requests whose kv_transfer_params belong to another prompt.",
    "kv_params_other_adapter": (
        "Requests whose kv_transfer_params belong to another LoRA adapter, or to other weights."
    ),
    "kv_params_unsigned": (
        "Requests whose kv_transfer_params have no signature, on an engine with a secret."
    ),
    "kv_params_forged": "Requests whose kv_transfer_params have a wrong signature.",
    "kv_params_host_replaced": (
        "Requests whose signed kv_transfer_params name another host than was signed."
    ),
    "kv_params_expired": "Requests whose kv_transfer_params are too old.",
    EVENTS_DROPPED: "Events of requests' timelines that were dropped: the engine made no step meanwhile.",
    "prefixes_asked": "Prefills that asked a decode engine for the KV of an earlier answer.",
    "prefixes_found": "Prefills for which a decode engine had KV that this engine lacked.",
    "prefixes_unanswered": (
        "Prefills whose decode engine did not answer within return_timeout, or was not reached."
    ),
    "prefixes_of_unknown_engines": (
        "Prefills that named a decode engine which has not connected to this one."
    ),
    "prefixes_unsupported": (
        "Prefills with images, an adapter or prompt logprobs, which ask no decode engine for KV."
    ),
    "prefixes_leased": "Prompts whose cached blocks were leased to a prefill engine.",
    "prefixes_missed": (
        "Prompts that a prefill engine asked for and this engine's prefix cache did not have."
    ),
    "prefixes_refused": (
        "Prompts that a prefill engine asked for while too many questions or leases were open."
    ),
}
GAUGES = {
    "leases_held": "Requests whose blocks are kept for decode engines now.",
    "blocks_held": "KV blocks kept for decode engines now.",
    "requests_waiting_for_remote_kv": (
        "Requests here that wait for, or read, another engine's blocks now."
    ),
    "blocks_quarantined": (
        "KV blocks of failed loads that a hung prefill engine may still write into now."
    ),
}


def merge(reports: Sequence[StatsReport]) -> StatsReport:
    """Add up the counters and transfers of several reports; of a gauge, the latest wins.

    Of more than :data:`~pdrelay_connector.core.timeline.MAX_EVENTS` events the oldest are dropped,
    and counted.
    """
    counters: Counter[str] = Counter()
    merged = StatsReport()
    for report in reports:
        counters.update(report.counters)
        merged.gauges.update(report.gauges)
        merged.transfers += report.transfers
        merged.incompatible += report.incompatible
        merged.compatible += report.compatible
        merged.events += report.events
        merged.failures.update(report.failures)
        for engine, loads in report.peer_loads.items():
            merged.peer_loads[engine] = dict(
                Counter(merged.peer_loads.get(engine, {})) + Counter(loads)
            )
    if (dropped := len(merged.events) - MAX_EVENTS) > 0:
        counters[EVENTS_DROPPED] += dropped
        del merged.events[:dropped]
    merged.counters = dict(counters)
    return merged
