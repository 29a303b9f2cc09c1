"""What several workers have counted, added up."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.recent_stats import RollingSeries
from pdrelay_proxy.core.schemas import Bin
from pdrelay_proxy.core.workers.reports import Counts, absorb, bin_of, counts_of

PATHS = frozenset({"/v1/completions"})


def counters(*seconds):
    found = Counters(PATHS)
    for value in seconds:
        found.requests["/v1/completions", "ok"] += 1
        found.ttft.observe(("/v1/completions",), value)
        found.durations.observe(("/v1/completions", "ok"), value)
        found.inter_token.observe(("/v1/completions",), value)
        found.queue_times.observe(("/v1/completions",), value)
        found.handoff.observe(value)
        found.transfers_missing[(InstanceId("decode-0"),)] += 2
    return found


def carried(one):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(counts_of(one)), type=Counts)


@given(st.lists(st.lists(st.floats(0.0, 400.0), max_size=5), min_size=1, max_size=4))
def test_the_sum_is_what_one_worker_would_have_counted(parts):
    """Counters and histograms alike; and nobody's own numbers change by it."""
    own, *others = (counters(*values) for values in parts)
    whole = Counters(own.paths)
    for counts in (counts_of(own), *(carried(one) for one in others)):
        absorb(whole, counts)
    alone = counters(*(value for values in parts for value in values))

    assert whole.requests == alone.requests
    assert whole.transfers_missing == alone.transfers_missing
    assert whole.handoff.counts == alone.handoff.counts
    assert abs(whole.handoff.total - alone.handoff.total) < 1e-6
    for name in ("durations", "ttft", "inter_token", "queue_times"):
        summed, counted = getattr(whole, name).by_key, getattr(alone, name).by_key
        assert {key: one.counts for key, one in summed.items()} == {key: one.counts for key, one in counted.items()}
    assert counts_of(own) == counts_of(counters(*parts[0]))


def test_what_has_another_shape_is_left_out():
    """A worker of another version may be the successor."""
    found = counters(1.0)
    absorb(found, Counts({"strange": {("x",): 1}}, {"handoff": {(): ((1, 2), 3.0)}}))

    assert found.handoff.total == 1.0


def test_bins_are_added_as_if_one_ring_had_seen_all():
    """Means by their weight; what nobody has seen has no mean."""
    one, other, both = RollingSeries(), RollingSeries(), RollingSeries()
    for ring, values in ((one, (1.0, 2.0)), (other, (6.0,))):
        for value in values:
            ring.add_all([value], failed=value == 6.0, now=10.0)
            both.add_all([value], failed=value == 6.0, now=10.0)

    assert bin_of([one.last(60, now=10.0), other.last(60, now=10.0)]) == both.last(60, now=10.0)
    assert bin_of([Bin(0, 0, None, None)] * 2) == Bin(0, 0, None, None)
    assert bin_of([]) == Bin(0, 0, None, None)
