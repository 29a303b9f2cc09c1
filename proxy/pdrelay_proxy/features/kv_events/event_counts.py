"""The counters of KV events and of known prompts, and their metrics."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdrelay_proxy.core.counters import Key, forget
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.io.metric_families import Family, counter_family, gauge_families


@dataclass(slots=True)
class EventCounts:
    """Counters since the start, and gauges; most keys begin with an engine."""

    events: Counter[Key] = field(default_factory=Counter[Key])  # and the kind of event
    disconnects: Counter[Key] = field(default_factory=Counter[Key])  # and EndReason
    index_drops: Counter[Key] = field(default_factory=Counter[Key])
    connections: Counter[Key] = field(default_factory=Counter[Key])  # and FollowState: 1
    index_blocks: Counter[Key] = field(default_factory=Counter[Key])  # blocks in the index, now
    # by event (KnownPrompts.counts)
    known_prompts: Counter[Key] = field(default_factory=Counter[Key])
    known_prompt_bytes: Counter[Key] = field(default_factory=Counter[Key])  # (): now

    def keep(self, engines: frozenset[InstanceId]) -> None:
        """Drop the series of removed engines: a changing fleet must not grow the metrics."""
        for counter in (
            self.events,
            self.disconnects,
            self.index_drops,
            self.connections,
            self.index_blocks,
        ):
            forget(counter, engines)

    def families(self) -> Iterator[Family | None]:
        """Yield the metrics."""
        text = (
            "What engines have told of their caches: blocks stored and removed, resets, and what "
            "was not understood."
        )
        yield from counter_family("pdrelay_kv_events", text, ("instance", "event"), self.events)
        text = "Connections for KV events that ended or could not be opened, by reason."
        yield from counter_family(
            "pdrelay_kv_event_disconnects", text, ("instance", "reason"), self.disconnects
        )
        text = (
            "Times that all was forgotten of an engine because it has more blocks than the router "
            "remembers."
        )
        yield from counter_family("pdrelay_kv_index_drops", text, ("instance",), self.index_drops)
        text = "1 for what has become of the connection for the KV events of an engine."
        yield from gauge_families(
            "pdrelay_kv_event_connections", text, ("instance", "state"), self.connections
        )
        text = "Blocks that are remembered of an engine's cache."
        yield from gauge_families("pdrelay_kv_index_blocks", text, ("instance",), self.index_blocks)
        text = (
            "Texts and chats whose token ids prefill engines were asked for, by what became of the "
            "ids."
        )
        yield from counter_family("pdrelay_known_prompts", text, ("event",), self.known_prompts)
        text = "Memory of the token ids of texts and chats, about."
        yield from gauge_families("pdrelay_known_prompt_bytes", text, (), self.known_prompt_bytes)
