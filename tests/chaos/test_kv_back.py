"""D is frozen or killed while P asks it for KV of an answer, or reads it: the text is right, and nothing stays held."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.cluster import OVER_TCP, Watch, engine_spec, nothing_held, wait_until
from support.hand_chats import Chat, alone, engine_id
from support.legs import STALL_SECONDS, STALL_TOKENS, plain, prompt_of
from support.victims import HELD, LINGERING, Victim, stalling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LEASE, TIMEOUT, STALL = 8.0, 3.0, 3.0  # s; a step of STALL ends before the lease does
FOUND = "vllm:pdrelay_prefixes_found_total"
FAILED = tuple(f"vllm:pdrelay_loads_failed_{why}_total" for why in ("timeout", "peer", "transfer", "handshake"))
ATTEMPTS = 3  # to find D in the middle of a read: on a busy machine it may answer too late


@pytest.fixture(scope="module")
def trio(fleet, model, mode, reference):
    """P, the D that is in trouble, and another one that answers meanwhile."""
    config = {
        "return_kv": True, "kv_lease_duration": LEASE, "transfer_timeout": TIMEOUT, "registration_timeout": 20,
        "handshake_timeout": 2, "retry_after": 0.1,
    }  # fmt: skip

    def victim(name):
        spec = engine_spec(
            f"back-{mode}-{name}",
            model,
            role=None,
            connector=Connector.PDRELAY,
            mode=TransferMode(mode),
            extra_connector_config=config,
            extra_env={**OVER_TCP, STALL_SECONDS: str(STALL)},
        )
        return Victim(stalling(spec, seconds=STALL), fleet)

    trio = SimpleNamespace(p=victim("p"), d=victim("d"), other=victim("other"), reference=reference)
    start(trio)
    yield trio
    fleet.stop(*(each.child for each in engines(trio)))


def engines(trio):
    return trio.p, trio.d, trio.other


def start(trio):
    for each in engines(trio):
        each.start()
    trio.p.fleet.wait_ready([each.child for each in engines(trio)], timeout_s=300)


def chat_of(trio, seed):
    """Hold two turns, so that P has met D and has read from it."""
    start(trio)
    chat = Chat(trio.p.spec, trio.d.spec, seed, salt=f"chaos {seed} {time.monotonic()}")
    answers = [chat.turn()[0] for _ in range(2)]
    wait_until(lambda: nothing_held(trio.p.spec), seconds=20, what="P holds nothing")
    return chat, answers


def trouble(trio, how):
    trio.d.freeze() if how == "frozen" else trio.d.kill()


def recover(trio, how):
    """D goes on, or a new one comes: nobody keeps a block of the other for longer than a lease."""
    if how == "frozen":
        trio.d.thaw()
    start(trio)
    for each in engines(trio):
        wait_until(lambda each=each: nothing_held(each.spec), seconds=LEASE + 20, what=f"{each.spec.name} is idle")
        wait_until(lambda each=each: each.now(LINGERING) == 0, seconds=20, what=f"{each.spec.name} pins nothing")


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_while_p_asks(trio, how):
    """It costs P the second that it waits, and no more."""
    chat, answers = chat_of(trio, 21)
    name = engine_id(trio.d.spec)
    chat.say()
    trouble(trio, how)
    try:
        with Watch(trio.p.spec) as p:
            params = chat.prefill(name)
            chat.d = trio.other.spec
            answers.append(chat.answer(params))
    finally:
        recover(trio, how)

    assert answers == alone(trio.reference, 21, 3)
    assert p.delta(FOUND) == 0


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_while_p_reads(trio, how):
    """P has a lease and is kept in a step; D is stopped before P begins to read, and so the read hangs.

    It ends with ``transfer_timeout``. P then computes in other blocks: those of the read stay pinned until it is over.
    """
    for attempt in range(ATTEMPTS):
        seed = 30 + attempt
        chat, answers = chat_of(trio, seed)
        name = engine_id(trio.d.spec)
        chat.say()
        with Watch(trio.p.spec) as p, ThreadPoolExecutor(3) as pool:
            first = pool.submit(plain, trio.p.spec, prompt_of(100 + 2 * attempt, STALL_TOKENS), tokens=1)
            time.sleep(0.3)  # it is in a step of STALL; the next two come into the step after that
            asking = pool.submit(chat.prefill, name)
            time.sleep(0.3)
            second = pool.submit(plain, trio.p.spec, prompt_of(101 + 2 * attempt, STALL_TOKENS), tokens=1)
            first.result()
            asked_by = time.monotonic() + STALL / 2
            while trio.d.now(HELD) == 0 and time.monotonic() < asked_by:
                time.sleep(0.02)
            time.sleep(0.3)  # P has asked, D has answered, and P is in its second step of STALL
            trouble(trio, how)
            try:
                params = asking.result()
                chat.d = trio.other.spec
                answers.append(chat.answer(params))
                second.result()
            finally:
                recover(trio, how)
        assert answers == alone(trio.reference, seed, 3)
        found = p.delta(FOUND)
        failed = sum(map(p.delta, FAILED))
        if found and failed:
            return
    pytest.fail("D never was in trouble between its answer and the end of the read")


def test_afterwards_it_goes_back_again(trio):
    """Whoever was in trouble is asked again, and read from."""
    start(trio)
    wait_until(lambda: _reads(trio), seconds=60, what="P reads from D again")
    recover(trio, "killed")


def _reads(trio):
    chat, _ = chat_of(trio, 40 + int(time.monotonic()) % 50)
    _, p = chat.turn()
    return p.loaded > 0
