"""Whatever happens between the turns of chats: no wrong text, no lease that nobody ends, nothing left over."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdrelay_proxy.features.first_token.settings import FirstTokenFrom
from pdrelay_proxy.features.kv_events.settings import KvEvents
from pdrelay_proxy.settings import PolicyName
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.chat_scenes import CACHE_BLOCKS, DECODE, PREFILL, STICKY, Ask, Scene

CHATS = range(4)
FAULTS = st.builds(
    SimulatedFault,
    st.sampled_from([FaultKind.DROP, FaultKind.STATUS, FaultKind.ERROR_EVENT, FaultKind.END]),
    st.sampled_from([None, 0, 1, 2, 4]),
    status=st.sampled_from([500, 503]),
    times=st.just(1),
)
HAPPENINGS = st.one_of(
    st.tuples(st.just("edit"), st.sampled_from(CHATS)),
    st.tuples(st.just("evict"), st.sampled_from(PREFILL + DECODE), st.sampled_from([4, CACHE_BLOCKS])),
    st.tuples(st.just("restart"), st.sampled_from(PREFILL + DECODE)),
    st.tuples(st.just("fail"), st.sampled_from(PREFILL + DECODE), FAULTS),
    st.tuples(st.just("go"), st.sampled_from(PREFILL + DECODE)),
)
ASKS = st.builds(
    Ask,
    st.sampled_from(CHATS),
    streams=st.booleans(),
    tokens=st.integers(1, 6),
    is_long=st.booleans(),
    leaves=st.sampled_from([None, None, None, 0, 1, 3]),
)
ROUNDS = st.lists(
    st.tuples(st.lists(HAPPENINGS, max_size=2), st.lists(ASKS, min_size=1, max_size=4, unique_by=lambda ask: ask.chat)),
    min_size=2,
    max_size=6,
)
OPTIONS = st.fixed_dictionaries({
    "policy": st.sampled_from([PolicyName.PREFIX, "expected_ttft"]),
    "kv_events": st.sampled_from(KvEvents),
    "first_token_from": st.sampled_from(FirstTokenFrom),
    "resume_streams": st.booleans(),
    "min_split_new_bytes": st.sampled_from([0, 200]),
})  # fmt: skip


@pytest.fixture(scope="module")
def runner():
    """One event loop for all scenes."""
    with asyncio.Runner() as found:
        yield found


def play(runner, options, rounds, seed):
    policy = options.get("policy", PolicyName.PREFIX)
    others = {name: value for name, value in options.items() if name != "policy"}
    scene = Scene(STICKY | others | {"prefill_policy": policy, "decode_policy": policy}, seed)
    runner.run(scene.play(rounds))
    return scene


SCENES = given(options=OPTIONS, rounds=ROUNDS, seed=st.integers(0, 2**16))
FIXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@hypothesis_settings(max_examples=14, phases=[Phase.explicit, Phase.generate], derandomize=True, **FIXED)
@SCENES
def test_chats_get_the_text_of_one_engine_and_leave_nothing_behind(runner, options, rounds, seed):
    """With turns at once, evictions, restarts, failures, clients that leave and that edit what was said."""
    play(runner, options, rounds, seed)


@pytest.mark.thorough  # four minutes
@pytest.mark.timeout(1800)  # 400 scenes of half a second, and a busy machine takes several times as long
@hypothesis_settings(max_examples=400, phases=[Phase.generate], **FIXED)
@SCENES
def test_the_same_of_many_more_chats(runner, options, rounds, seed):
    """Any of them, each time others; a scene takes too long to make it smaller."""
    play(runner, options, rounds, seed)
