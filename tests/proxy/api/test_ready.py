"""GET /ready says whether a request would be served."""

import pytest

from support.sim import router, sims
from xpyd_proxy.settings import Settings


@pytest.mark.parametrize(("x", "y", "alone", "status"), [(0, 1, True, 200), (0, 1, False, 503), (1, 0, True, 503)])
async def test_what_is_needed_for_it(x, y, alone, status):
    """Decode engines serve without prefill engines, unless the operator does not want that: a load balancer that took
    the router out would turn slow answers into none."""
    settings = Settings(decode_only_fallback=alone)
    async with router(sims(x, y), settings) as client:
        ready = await client.get("/ready")
        answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})

    assert ready.status_code == status
    assert (answer.status_code == 200) == (status == 200)
