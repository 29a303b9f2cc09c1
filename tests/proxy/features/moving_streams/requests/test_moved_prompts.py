"""A prompt whose decode engine is drained while it is computed goes to another one.

The features "slices" and "prompt_arrays" have a part in it.
"""

import asyncio
import json

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import EngineResponse, Role
from pdrelay_proxy.features.slices.settings import SlicePairing, SliceSettings
from pdrelay_proxy.settings import Settings
from support.greedy import events
from support.scripted import JSON, Scripted, call, pulled_prefill, request_id, router_of, until

BODY = {"stream": True, "temperature": 0, "max_tokens": 24, "prompt": "hi"}
PREFERRING = Settings().with_features(SliceSettings(SlicePairing.PREFER))
DECODES = ("decode-0", "decode-1", "decode-2")


async def test_a_prompt_that_is_still_computed_stays_within_its_slice():
    """The KV cache would cross a slow link, as it would not have without the drain."""
    go_on = asyncio.Event()

    async def prefill(leg):
        await go_on.wait()
        return await pulled_prefill(leg)

    async def decode(leg):
        return 200, [*events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}", per_event=1)]

    engines = Scripted(prefill, decode)
    router = router_of(engines, 1, 3, settings=PREFERRING, resume_streams=True)
    registry = router.registry
    for name, where in zip(("prefill-0", *DECODES), "aaba", strict=True):
        registry.learn(name, EngineCapabilities(slice=where))
    registry.departures.drain("decode-2", now=0.0)
    clients = [router.start(call(**BODY), f"r{number}") for number in range(4)]
    await until(lambda: len(engines.legs) == 4)
    near, far, _ = (registry.member(name).load.in_flight for name in DECODES)
    registry.departures.undrain("decode-2", now=0.0)
    registry.departures.drain("decode-0", now=0.0, moves=True)
    router.moves.cut_streams()
    after = [registry.member(name).load.in_flight for name in DECODES]
    go_on.set()
    for client in clients:
        await client.end()

    assert near > 1
    assert after == [0, far, near]
    assert router.is_idle()


async def test_prompts_that_are_still_computed_get_another_decode_engine():
    """As those of other requests: else the queue of a prefill engine would hold up the engine that is left."""
    go_on = asyncio.Event()

    async def prefill(leg):
        await go_on.wait()
        return await pulled_prefill(leg)

    async def answers(leg):
        prompt = json.loads(leg.body)["prompt"]
        said = {"id": "x", "choices": [{"index": 0, "text": f"<{prompt}>"}]}
        return EngineResponse(200, JSON, json.dumps(said).encode())

    router = router_of(engines := Scripted(prefill, answers), 1, 2)
    client = router.start(call(prompt=["zero", "one", "two"]))
    await until(lambda: len(engines.legs) == 3)
    router.registry.departures.drain("decode-0", now=0.0, moves=True)
    router.moves.cut_streams()
    drained = [one.id for one in router.registry.settle(patience_s=60, now=1.0)]
    go_on.set()
    await client.end()

    assert drained == ["decode-0"]
    assert {leg.instance.id for leg in engines.of(Role.DECODE)} == {"decode-1"}
    assert [choice["text"] for choice in json.loads(client.body)["choices"]] == ["<zero>", "<one>", "<two>"]
    assert router.is_idle()
