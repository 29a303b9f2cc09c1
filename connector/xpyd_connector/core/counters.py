"""What happened, counted: the numbers that reach vLLM's stats and Prometheus."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """One finished transfer."""

    seconds: float
    bytes: int
    descriptors: int
    posting: float = 0.0  # s that handing it to NIXL took


class Report(msgspec.Struct):
    """Counters since the last report, gauges as they are now, and every transfer in between."""

    counters: dict[str, int] = {}
    gauges: dict[str, float] = {}
    transfers: list[Sample] = []

    def __bool__(self) -> bool:
        return bool(self.counters or self.gauges or self.transfers)


@dataclass(slots=True)
class Tally:
    """Filled by one thread, emptied by the same thread."""

    _counters: Counter[str] = field(default_factory=Counter[str])
    _transfers: list[Sample] = field(default_factory=list[Sample])

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter; ``name`` is one of :data:`COUNTERS`."""
        if by:  # nothing is no news: a report of zeros would travel for it
            self._counters[name] += by

    def moved(self, sample: Sample) -> None:
        """Record one finished transfer."""
        self._transfers.append(sample)

    def take(self) -> Report:
        """Return what was counted since the last call, and start again at zero."""
        report = Report(counters=dict(self._counters), transfers=self._transfers)
        self._counters, self._transfers = Counter(), []
        return report


class Telling(Tally):
    """Tells at once what it is told, on the thread that fills it.

    For a thread whose messages have our scheduler take an engine step: vLLM collects the workers' numbers with a step,
    and what is told after the last one waits for the next request.
    """

    def __init__(self, tell: Callable[[Report], None]) -> None:
        super().__init__()
        self._tell = tell

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        super().count(name, by)
        self._tell(self.take())

    def moved(self, sample: Sample) -> None:
        """Record one finished transfer."""
        super().moved(sample)
        self._tell(self.take())


COUNTERS = {
    "leases_granted": "Prefills whose blocks were kept for a decode engine.",
    "leases_renewed": "Renewals received for leases that were held.",
    "leases_done": "Leases that ended because every decode rank had read its blocks.",
    "leases_dropped": "Leases that ended because the decode engine did not want the blocks.",
    "leases_peer_lost": "Leases that ended because the decode engine's connection closed.",
    "leases_expired": "Leases that nobody renewed in time.",
    "leases_revoked": "Leases that ended unread because a prefill lacked blocks.",
    "leases_refused": "Prefills not handed over because max_leases or max_held_share was reached.",
    "foreign_messages": "Messages about leases, reads and pushes that another engine holds; they changed nothing.",
    "strangers_refused": "Connections to the side channel refused: no proof of the secret, or another engine expected.",
    "strangers_without_tls": "Connections to the side channel that did not complete TLS.",
    "strangers_late": "Connections to the side channel that did not prove themselves in time.",
    "strangers_crowded_out": "Connections to the side channel closed because too many had not proven themselves.",
    "strangers_over_budget": "Connections to the side channel closed: they sent many TLS records and no proof.",
    "strangers_without_descriptor": "Times that a connection was not accepted because no file descriptor was left.",
    "late_notifications": "Messages about leases, reads and pushes that were already over, or unknown.",
    "early_notifications": "Push: what decode engines said of transfers whose prefill was not done.",
    "registrations": "Push: requests for which decode engines lent blocks to write into.",
    "pushes": "Push: requests whose KV was written completely, counted on each rank.",
    "pushes_ceased": "Push: requests whose KV was not written completely, counted on each rank.",
    "pushes_refused": "Push: registrations refused because too many were open.",
    "transfers_duplicate": "Push: prefills not handed over because another has the same transfer id.",
    "transfers_bad": "Push: prefills not handed over because their transfer id could not be used.",
    "reads_unfenced": "Reads that ended after their lease: their bytes were thrown away.",
    "renewals_sent": "Leases renewed at prefill engines, one per request and heartbeat.",
    "registrations_sent": "Push: requests for which blocks were lent to prefill engines.",
    "registrations_reconnected": "Push: requests registered over a new connection because the one before had ended.",
    "renewals_withheld": "Leases not renewed because this engine's loop had not turned for engine_loop_timeout.",
    "drops_sent": "Requests whose blocks were given back unread.",
    "lapsed": "Leases a prefill engine said it does not hold, or not for this engine.",
    "loads_revoked": "Requests that compute their own prompt because their lease was lost before they read.",
    "handshakes": "Prefill engines met.",
    "handshakes_failed": "Prefill engines that could not be met.",
    "peers_lost": "Prefill engines whose connection closed.",
    "loads": "Requests whose KV was loaded and confirmed.",
    "loads_failed_handshake": "Loads that failed because the prefill engine could not be met.",
    "loads_failed_transfer": "Loads that failed because NIXL or the network did.",
    "loads_failed_timeout": "Loads that took longer than transfer_timeout.",
    "loads_failed_lease": "Loads that failed because the lease was lost before the read ended.",
    "loads_failed_peer": "Loads that failed because the prefill engine's connection closed.",
    "loads_failed_staging": "Loads that failed because host memory was too small, or copying to or from it failed.",
    "bytes_staged_out": "Bytes of KV copied from the device into host memory.",
    "bytes_staged_in": "Bytes of KV copied from host memory into the device.",
    "loads_aborted": "Push: requests that were aborted before their KV was there.",
    "loads_skipped_local": "Offers not used because the prompt was in the local prefix cache, or is one token.",
    "offers_bad": "Offers not used because their kv_transfer_params could not be read.",
    "offers_other_prompt": "Offers not used because they belong to another prompt.",
    "offers_unsigned": "Offers not used because they have no signature, and this engine has a secret.",
    "offers_forged": "Offers not used because their signature is wrong.",
    "offers_expired": "Offers not used because they are too old.",
}
GAUGES = {
    "leases_held": "Requests whose blocks are kept for decode engines now.",
    "blocks_held": "KV blocks kept for decode engines now.",
    "requests_borrowing": "Requests here that wait for, or read, another engine's blocks now.",
    "blocks_lingering": "KV blocks of failed loads that a hung prefill engine may still write into now.",
}


def merge(reports: Sequence[Report]) -> Report:
    """Add up the counters and transfers of several reports; of a gauge, the latest wins."""
    counters: Counter[str] = Counter()
    merged = Report(gauges={})
    for report in reports:
        counters.update(report.counters)
        merged.gauges.update(report.gauges)
        merged.transfers = [*merged.transfers, *report.transfers]
    merged.counters = dict(counters)
    return merged
