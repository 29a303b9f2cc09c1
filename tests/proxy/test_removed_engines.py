"""What a router learns of an engine goes when the engine does: each pod is an engine with an id of its own."""

import gc
import time
from collections import deque
from functools import partial
from types import CellType, FunctionType, MethodType

import httpx

from pdrelay_proxy.app import build
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom, FirstTokenSettings
from pdrelay_proxy.settings import Settings
from support.sim import InMemory, sims

ENGINES = ("prefill-0", "decode-0")
FOLLOWED = dict, list, tuple, set, deque, partial, FunctionType, MethodType, CellType
KEY = {"X-Api-Key": "sesame"}
# Those that keep a bounded number of engines, or drop those that are gone when others come.
BOUNDED = {"MissingPaths", "Pool", "Rotation"}


def dicts_with(name, *starts):
    """Return the classes of our objects that have a dict with this key, of all that can be reached."""
    seen = set()
    found = set()
    left = [(start, "") for start in starts]
    while left:
        one, owner = left.pop()
        is_ours = type(one).__module__.startswith("pdrelay_proxy")
        if id(one) in seen or not (is_ours or isinstance(one, FOLLOWED)):
            continue
        seen.add(id(one))
        owner = type(one).__name__ if is_ours else owner
        if isinstance(one, dict) and any(key == name or (isinstance(key, tuple) and name in key) for key in one):
            found.add(owner)
        # not the globals of a function
        inner = one.__closure__ or () if isinstance(one, FunctionType) else gc.get_referents(one)
        left += [(other, owner) for other in inner]
    return found


async def test_a_removed_engine_is_forgotten_by_all_that_learned_of_it():
    """A fleet that grows and shrinks each day has had thousands of them after a year."""
    network = InMemory(sims(2, 2, offers=True), time.monotonic)
    settings = Settings(
        prefill=("p0:80", "p1:80"),
        decode=("d0:80", "d1:80"),
        admin_key="sesame",
        allowed_hosts=("*",),
        health_check_interval_s=0.0,
    ).with_features(FirstTokenSettings(FirstTokenFrom.PREFILL))
    router = build(settings, fabric=network.fabric)
    transport = httpx.ASGITransport(router.app, raise_app_exceptions=False)
    async with network.running(router.app), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for _ in range(4):
            response = await client.post(
                "/v1/completions", json={"prompt": "hello " * 50, "max_tokens": 3, "stream": True}
            )
            assert response.status_code == 200
        known = dicts_with("prefill-0", router.live, router.requests)
        for name in ENGINES:
            removed = await client.post("/instances/remove", json={"id": name}, headers=KEY)
            assert removed.status_code == 200
        await client.get("/stats", headers=KEY)
        left = [dicts_with(name, router.live, router.requests) - BOUNDED for name in ENGINES]

    assert {"PushCoordinates", "LegBodies", "FirstTokens"} <= known
    assert left == [set(), set()]
