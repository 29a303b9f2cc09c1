"""A decode engine without KV room on real engines: its streams move before vLLM preempts them again and again."""

from collections import Counter
from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.both_roles import BOTH, MOVES
from support.cluster import Watch, engine_spec, nothing_held, start_engine, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from support.router_orders import all_at, moved_streams, states

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

# All streams begin at one of the two: together they need 1.5 times the KV cache of one.
COUNT, TOKENS, ROOM_MIB = 6, 500, 8  # 2,048 tokens of room
# A busy machine takes a second to read the engines' metrics and to move streams.
EARLY = ("--move-above", "0.6", "--engine-metrics-interval", "0.2")
ATTEMPTS = 3  # to have them move in time: a busy machine may keep the router from looking until its engine is full
PREEMPTED = "vllm:num_preemptions_total"


@pytest.fixture(scope="module", params=[TransferMode.PULL, pytest.param(TransferMode.PUSH, marks=pytest.mark.thorough)])
def trio(request, fleet, model):
    """1P2D; the decode engines are small."""
    sizes = {"p0": 128, "d0": ROOM_MIB, "d1": ROOM_MIB}
    specs = {
        name: engine_spec(
            f"full-{request.param}-{name}",
            model,
            mode=request.param,
            **BOTH | {"kv_cache_mib": size, "max_model_len": 1024},
        )
        for name, size in sizes.items()
    }
    children = [start_engine(fleet, spec) for spec in specs.values()]
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(**specs)
    fleet.stop(*children)


def served(trio, start_router, name, *args):
    """Run all streams at one engine, the other of which comes back soon; return them, and the times it preempted."""
    url = start_router(name, [trio.p0], [trio.d0, trio.d1], args=(*MOVES, *args), env={"ADMIN_API_KEY": ADMIN_KEY})
    wait_until(lambda: states(url) == ["healthy"] * 3, seconds=20, what="the router has seen all engines")
    with Watch(trio.d0) as watch:
        asked = list(bodies(COUNT, TOKENS, seed=3, salt=name))
        streams = all_at(url, "decode-0", "decode-1", asked, lambda: None, behind=20)
    for spec in (trio.p0, trio.d0, trio.d1):
        wait_until(lambda spec=spec: nothing_held(spec), seconds=40, what=f"{spec.name} is idle")
    return streams, watch.delta(PREEMPTED), moved_streams(url)


def test_streams_leave_an_engine_that_is_full(trio, start_router):
    """With --move-above some go to the engine with room, their texts are right, and fewer are computed anew."""
    expected = run(trio.p0.base_url, bodies(COUNT, TOKENS, seed=3, salt="alone"))
    kept, often, none = served(trio, start_router, "router-full-off")
    check(kept, expected)
    assert none == {}
    for number in range(ATTEMPTS):
        moved, seldom, counted = served(trio, start_router, f"router-full-on-{number}", *EARLY)
        pauses = [max(one.longest_s for one in streams) * 1000 for streams in (kept, moved)]
        print(f"\npreempted {often:.0f} times, and {seldom:.0f} with --move-above; {dict(counted)}")
        print(f"longest pause of a stream {pauses[0]:.0f} ms, and {pauses[1]:.0f} ms")
        check(moved, expected)
        assert counted["moved"] > 0
        if seldom < often:
            return
    pytest.fail("as many are computed anew in each attempt as without --move-above")


def check(streams, expected):
    assert Counter(one.verdict(other) for one, other in zip(streams, expected, strict=True)) == {"right": COUNT}
