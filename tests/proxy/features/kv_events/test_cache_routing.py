"""Requests go where their prompt is cached, as engines tell it: whoever sent it there, and not where it was evicted."""

import contextlib

import httpx
import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.settings import Settings
from support.cache_followers import FOLLOWING, explained
from support.sim import cluster, fleet, serving, until

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


def test_salts_keep_prompts_apart():
    """A prompt with another salt is new everywhere."""
    with cluster(1, 1, FOLLOWING, cache_blocks=100) as found:
        found.engines["d0"].cache.use(IDS, "mine")
        knows(found.router, {"prefill-0": 0, "decode-0": 384}, cache_salt="mine")

        assert known(found.router) == {"prefill-0": 0, "decode-0": 0}
        assert known(found.router, cache_salt="yours")["decode-0"] == 0


def test_an_engine_without_events_is_known_by_what_it_was_sent():
    """As without the setting; the others are asked."""
    with contextlib.ExitStack() as stack:
        engines, at, _ = stack.enter_context(fleet(1, 1, cache_blocks=100))
        engines["d0"].cache, told = None, engines["d0"].cache
        settings = {name: getattr(FOLLOWING, name) for name in FOLLOWING.__dataclass_fields__}
        settings |= {"prefill": (at["p0"],), "decode": (at["d0"],)}
        router = stack.enter_context(serving(build(Settings(**settings)).app))
        knows(router, {"prefill-0": 0})
        timings = [ask(router), ask(router)]
        until(lambda: shown(router) >= SHOWN)
        disconnects = 'pdrelay_kv_event_disconnects_total{instance="decode-0",reason="refused"}'
        refused = [line for line in shown(router) if line.startswith(disconnects)]

    assert ['reason;desc="cached_prompt"' in timing for timing in timings] == [False, True]
    assert told.has(IDS) == 0
    assert refused  # at least once: an engine is asked again when it is known to be up


SHOWN = {
    'pdrelay_kv_event_connections{instance="decode-0",state="refused"} 1.0',
    'pdrelay_kv_event_connections{instance="prefill-0",state="following"} 1.0',
    'pdrelay_kv_index_blocks{instance="prefill-0"} 25.0',
    'pdrelay_kv_events_total{event="stored",instance="prefill-0"} 25.0',
}


def shown(router):
    return set(httpx.get(f"http://{router}/metrics", timeout=20).text.splitlines())
