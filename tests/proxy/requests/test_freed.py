"""What a request was made of is freed with it, whatever becomes of it: nothing waits for the garbage collector."""

import gc

import pytest

from pdrelay_proxy.core.model import GenerationRequest
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.requests.legs import DecodeLeg, PrefillLeg
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.settings import KvTransferMode, Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import router, sims

PARTS = (Request, GenerationRequest, PrefillLeg, DecodeLeg, EngineError)
QUICK = {"first_token_timeout_s": 0.2, "stream_idle_timeout_s": 0.2, "total_timeout_s": 1.0}


@pytest.fixture(autouse=True)
def collector_at_rest():
    gc.collect(0)  # what lives now is older, and what is made from now on is young
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("after", [None, 2])
@pytest.mark.parametrize("failing", ["p0", "d0"])
@pytest.mark.parametrize("kind", [None, *FaultKind])
@pytest.mark.parametrize("mode", KvTransferMode)
@pytest.mark.slow  # 300 routers are built
async def test_a_request_is_freed_at_once(mode, kind, failing, after, streams):
    """Requests that all fail must not fill the memory."""
    engines = sims(mode=mode.value)
    body = {"prompt": "once upon a time", "max_tokens": 4, "stream": streams}
    async with router(engines, Settings(kv_transfer_mode=mode, **QUICK)) as client:
        for _ in range(2):  # the second one in push goes out at once
            if kind is not None:
                engines[failing].inject(SimulatedFault(kind, after=after, names=("remote_engine_id",)))
            await client.post("/v1/completions", json=body)
            engines[failing].inject(None)

    assert [one for one in gc.get_objects(generation=0) if isinstance(one, PARTS)] == []


@pytest.mark.parametrize("limit_s", [0.001, 0.002, 0.004, 0.006, 0.008, 0.01])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", KvTransferMode)
@pytest.mark.slow  # 36 more
async def test_a_leg_that_is_given_up_as_its_connection_opens_is_freed_at_once(mode, streams, limit_s):
    """The task that opens the connection keeps the CancelledError, whose traceback leads to the leg."""
    body = {"prompt": "once upon a time", "max_tokens": 4, "stream": streams}
    limits = {"first_token_timeout_s": limit_s, "stream_idle_timeout_s": limit_s}
    for _ in range(3):
        async with router(sims(mode=mode.value), Settings(kv_transfer_mode=mode, **limits)) as client:
            for _ in range(2):
                await client.post("/v1/completions", json=body)

    assert [one for one in gc.get_objects(generation=0) if isinstance(one, PARTS)] == []
