"""Requests go where their prompt is cached, as engines tell it: whoever sent it there, and not where it was evicted."""

import httpx
import pytest

from pdrelay_proxy.core.model import Api
from support.cache_followers import FOLLOWING, explained
from support.sim import cluster, until

pytestmark = pytest.mark.edges


IDS = list(range(100, 500))


def body(ids=IDS, **more):
    return {"model": "sim", "prompt": ids, "max_tokens": 4, **more}


def ask(router, ids=IDS, **more):
    answer = httpx.post(f"http://{router}{Api.COMPLETIONS}", json=body(ids, **more), timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.headers["server-timing"]


def known(router, ids=IDS, **more):
    """Return what the engines are known to have of a prompt, by their names."""
    return explained(router, Api.COMPLETIONS, body(ids, **more))["cached_tokens"]


def knows(router, tokens, ids=IDS, **more):
    """Wait for it."""
    until(lambda: known(router, ids, **more) == tokens)


NOTHING = {"prefill-0": 0, "prefill-1": 0, "decode-0": 0, "decode-1": 0}


def test_a_prompt_goes_where_another_router_has_sent_it():
    """Routers share no state: each is told by the engines."""
    with cluster(2, 2, FOLLOWING, cache_blocks=100) as found:
        knows(found.router, NOTHING)
        found.engines["p1"].cache.use(IDS)
        knows(found.router, NOTHING | {"prefill-1": 384})
        for _ in range(3):
            ask(found.router)
            found.engines["d0"].cache.clear()
            found.engines["d1"].cache.clear()
            knows(found.router, NOTHING | {"prefill-1": 384})

    assert (len(found.engines["p0"].log), len(found.engines["p1"].log)) == (0, 3)
    assert [entry.cached for entry in found.engines["p1"].log] == [384] * 3


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.GENERATE])
def test_a_decode_engine_that_has_a_prompt_serves_it_alone(api):
    """And one that has evicted it does not, however short ago it was there."""
    with cluster(1, 2, FOLLOWING, cache_blocks=40) as found:
        nothing = {name: 0 for name in NOTHING if name != "prefill-1"}
        knows(found.router, nothing)
        found.engines["d1"].cache.use(IDS)
        knows(found.router, nothing | {"decode-1": 384})
        first = _post(found.router, api)
        found.engines["d1"].cache.use(range(1000, 1640))  # all of its cache
        knows(found.router, nothing)
        second = _post(found.router, api)

    assert ('reason;desc="cached_prompt"' in first, 'reason;desc="cached_prompt"' in second) == (True, False)
    assert len(found.engines["p0"].log) == 1


def _post(router, api):
    asked = (
        body() if api is Api.COMPLETIONS else {"model": "sim", "token_ids": IDS, "sampling_params": {"max_tokens": 4}}
    )
    answer = httpx.post(f"http://{router}{api}", json=asked, timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.headers["server-timing"]
