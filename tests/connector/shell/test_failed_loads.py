"""A load that fails must not keep those that have not from being taken up: nothing would ever go on."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("the stories' kinds need vLLM 0.32", allow_module_level=True)
    from vllm.v1.request import RequestStatus

    from pdrelay_connector.shell.failed_loads import FailedLoads
    from support.cache_kinds import Pair
    from support.kinds_table import KINDS

from pdrelay_connector.core.layout.cache_groups import CacheGroup

pytestmark = [
    pytest.mark.usefixtures("no_warnings"),
    pytest.mark.timeout(240),  # importing vLLM takes half a minute on a busy machine
]
LONG = [number % 3 for number in range(70)]


def test_loads_that_have_ended_are_taken_up_before_one_that_failed():
    """A prompt that is computed here takes more blocks of a window than one that is loaded; others have the rest."""
    kind = KINDS["windows of several sizes"]
    pair = Pair(kind.shape(blocks=200), kind.shape(blocks=80))
    pair.d.movers[1].stuck = True
    for number in range(3):
        pair.ask(f"r{number}", [number, *LONG], 3, "pull")
        pair.run(1.0)
    first, *_ = pair.d.movers[1]._xfers
    pair.d.movers[1].cancel(first)
    pair.d.movers[1].stuck = False
    pair.run(30.0)

    assert pair.counts["loads"] == 3
    assert len(pair.d.loaded) == 2
    assert pair.is_done


def request(name, status, tokens=40):
    return SimpleNamespace(request_id=name, status=status, num_tokens=tokens)


@pytest.mark.parametrize(
    ("free", "status", "failed", "waits"),
    [
        (9, RequestStatus.WAITING_FOR_REMOTE_KVS, {"a"}, True),
        (9, RequestStatus.WAITING_FOR_REMOTE_KVS, {"a", "b"}, True),  # it holds its blocks until vLLM looks at it
        (10, RequestStatus.WAITING_FOR_REMOTE_KVS, {"a"}, False),
        (9, RequestStatus.RUNNING, {"a"}, False),
        (9, RequestStatus.WAITING_FOR_REMOTE_KVS, set(), False),
    ],
)
def test_only_a_failed_load_without_room_gives_way(free, status, failed, waits):
    """It would starve: it waits while loads that have ended hold blocks, and there are too few for it."""
    loads = FailedLoads((CacheGroup(4),), lambda: SimpleNamespace(get_num_free_blocks=lambda: free))
    first, second = request("a", RequestStatus.WAITING), request("b", status)
    loads.ended(["a", "b"], failed, {"a": first, "b": second})

    assert loads.gives_way(first, 0) is waits


def test_what_has_its_blocks_gives_way_no_more():
    """Preempted, it is in vLLM's other queue."""
    loads = FailedLoads((CacheGroup(4),), lambda: SimpleNamespace(get_num_free_blocks=lambda: 0))
    first, second = request("a", RequestStatus.WAITING), request("b", RequestStatus.WAITING_FOR_REMOTE_KVS)
    loads.ended(["a", "b"], {"a"}, {"a": first, "b": second})
    loads.over("a")
    assert not loads.gives_way(first, 0)
    loads.ended(["a"], {"a"}, {"a": first})
    loads.over("b")

    assert not loads.gives_way(first, 0)
