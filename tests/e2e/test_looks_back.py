"""Streams of engines whose own defaults look back at the tokens made so far: another engine would begin them anew."""

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.both_roles import MOVES, both_engines
from support.cluster import wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from support.router_orders import all_at, moved_streams, order, rows, states

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(500)]  # three engines, for one rare setting

PENALTY = ("--override-generation-config", '{"presence_penalty": 1.5}')


@pytest.mark.parametrize("mode", TransferMode, ids=str)
def test_streams_end_where_they_began(fleet, model, start_router, mode):
    """A drain that should move them leaves them in peace: a penalty that begins anew makes another text."""
    with both_engines(fleet, model, "looks-back", ("p0", "d0", "d1"), mode, extra_args=PENALTY) as engines:
        url = start_router(
            f"router-looks-back-{mode}", [engines.p0], [engines.d0, engines.d1], args=MOVES,
            env={"ADMIN_API_KEY": ADMIN_KEY},
        )  # fmt: skip
        wait_until(lambda: states(url) == ["healthy"] * 3, seconds=20, what="the router has seen all engines")
        expected = run(engines.p0.base_url, bodies(6, 300, seed=8, salt="alone"))
        streams = all_at(
            url, "decode-0", "decode-1", bodies(6, 300, seed=8, salt="moved"),
            lambda: order(url, "drain", "decode-0", move=True), behind=20,
        )  # fmt: skip

        assert [one.verdict(other) for one, other in zip(streams, expected, strict=True)] == ["right"] * 6
        assert moved_streams(url) == {"stayed": 6}
        wait_until(lambda: rows(url)["decode-0"]["in_flight"] == 0, seconds=10, what="decode-0 is empty")
