"""A request that waits for another connector must not wait for ours as well: its steps would take 0.2 s each."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.request import RequestStatus

    from pdrelay_connector.shell.other_connectors import OtherConnectors

from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


def request(status):
    return SimpleNamespace(request_id="a", status=status, num_tokens=40)


def others(*, free=100):
    pool = SimpleNamespace(get_num_free_blocks=lambda: free)
    return OtherConnectors([CacheGroup(4), CacheGroup(8)], lambda: pool)


@pytest.mark.parametrize(("free", "computed", "looks"), [(15, 0, True), (14, 0, False), (12, 8, True), (11, 8, False)])
def test_a_request_without_blocks_waits_for_another_connector_only_if_it_has_room(free, computed, looks):
    """It needs 10 blocks of one group and 5 of the other, without those that are cached."""
    found = others(free=free)
    waiting = request(RequestStatus.WAITING)
    found.answered(waiting, computed)

    assert found.have_work([waiting], set()) is looks


@pytest.mark.parametrize("end", ["allocated", "step"])
def test_what_vllm_has_allocated_or_will_ask_anew_is_forgotten(end):
    found = others()
    waiting = request(RequestStatus.WAITING)
    found.answered(waiting, 0)
    if end == "allocated":
        found.allocated(waiting)
    else:
        found.step_over()

    assert not found.have_work([waiting], set())


@pytest.mark.parametrize(("ours", "loads"), [(set(), True), ({"a"}, False)])
def test_a_load_that_is_none_of_ours_is_anothers(ours, loads):
    assert others().have_work([request(RequestStatus.WAITING_FOR_REMOTE_KVS)], ours) is loads
