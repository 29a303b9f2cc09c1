"""A model with a state under faults: the fences that protect KV protect the state, too. Never a wrong text."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.architectures import ARCHITECTURES, make
from support.cluster import engine_spec, nothing_held, start_engine, wait_until
from support.legs import OPEN, decode, decode_body, plain, prefill, prompt_of, push, text_of
from support.questions import Question, ask, client, differences
from support.shapes import meet
from support.victims import LEASE, LINGERING, PATIENT, Victim, hang_up, lost
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.local.recipe import Connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.thorough]  # minutes
PREEMPTIONS = "vllm:num_preemptions_total"
BLOCKS = 40  # of a cache that is too small for eight requests; each takes one for each of its three states
UNCACHED = "--no-enable-prefix-caching"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(ARCHITECTURES["granitemoehybrid"], tmp_path_factory.mktemp("model") / "granite")


@pytest.fixture(scope="module")
def reference(fleet, model):
    spec = engine_spec("state-reference", model, extra_args=(UNCACHED,))
    fleet.wait_ready([start_engine(fleet, spec)], timeout_s=300)
    return spec


@pytest.fixture(scope="module")
def pair(request, fleet, model, reference):
    """P and D; what is read from a stopped P comes when it runs again."""
    mode = request.param
    config = {"kv_lease_duration": LEASE, "transfer_timeout": PATIENT, "registration_timeout": PATIENT}
    config |= {"handshake_timeout": 2, "retry_after": 0.1}
    p, d = (
        Victim(
            engine_spec(
                f"state-{mode.value}-{side}", model, connector=Connector.XPYD, mode=mode, extra_connector_config=config,
                extra_args=(UNCACHED, "--num-gpu-blocks-override", str(BLOCKS), "--max-num-batched-tokens", "256"),
                extra_env={"UCX_TLS": "tcp"},
            ),
            fleet,
        )
        for side in "pd"
    )  # fmt: skip
    for victim in (p, d):
        victim.start()
    fleet.wait_ready([victim.child for victim in (p, d)], timeout_s=300)
    yield p, d, mode
    fleet.stop(*(victim.child for victim in (p, d) if victim.child in fleet.children))


both = pytest.mark.parametrize("pair", TransferMode, indirect=True, scope="module")
pull = pytest.mark.parametrize("pair", [TransferMode.PULL], indirect=True, scope="module")


def asked(pair, prompt):
    """Return what both engines answer."""
    p, d, mode = pair
    question = Question("ids", stream=False, prompt=tuple(prompt))
    if mode is TransferMode.PUSH:
        return push(p.spec, d.spec, question, meet(p.spec, d.spec, 1))[0]
    params = prefill(p.spec, prompt)
    with client(d.spec.base_url) as api:
        return ask(api, question, kv_transfer_params=params)


def answer(reference, prompt):
    with client(reference.base_url) as api:
        return ask(api, Question("ids", stream=False, prompt=tuple(prompt)))


def at_rest(*victims):
    for victim in victims:
        wait_until(lambda v=victim: nothing_held(v.spec), seconds=LEASE + 7, what=f"{victim.spec.name} holds nothing")


@both
def test_preempted(pair, reference):
    """A cache that is too small for eight at once: preempted requests compute their states again."""
    p, d, mode = pair
    where = meet(p.spec, d.spec, 1) if mode is TransferMode.PUSH else None
    prompts = [prompt_of(number, 300 + 40 * number) for number in range(8)]
    before = d.now(PREEMPTIONS) + p.now(PREEMPTIONS)

    def both_legs(prompt):
        question = Question("ids", stream=False, prompt=tuple(prompt))
        if where is not None:
            return push(p.spec, d.spec, question, where, tokens=200)[0]
        params = prefill(p.spec, prompt)
        with client(d.spec.base_url) as api:
            return ask(api, question, tokens=200, kv_transfer_params=params)

    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(both_legs, prompts))
    with client(reference.base_url) as api:
        theirs = [ask(api, Question("ids", stream=False, prompt=tuple(prompt)), tokens=200) for prompt in prompts]

    assert [our.text for our in ours] == [their.text for their in theirs]
    assert d.now(PREEMPTIONS) + p.now(PREEMPTIONS) > before
    at_rest(p, d)


@pull
def test_frozen_in_the_middle_of_a_read(pair, reference):
    """D sleeps for longer than the lease, and P uses every block for other prompts: the read is discarded."""
    p, d, _ = pair
    prompt = prompt_of(50, 900)
    assert differences(asked(pair, prompt_of(49, 60)), answer(reference, prompt_of(49, 60))) == []  # they have met
    params, failed = prefill(p.spec, prompt), d.now(lost("lease"))
    with ThreadPoolExecutor(1) as pool:
        with p.frozen():
            response = pool.submit(decode, d.spec, prompt, params)
            wait_until(lambda: d.now("vllm:xpyd_requests_waiting_for_remote_kv") == 1, seconds=5, what="D reads")
            d.freeze()
        try:
            wait_until(lambda: nothing_held(p.spec), seconds=LEASE + 5, what="P frees what D had leased")
            for number in range(3):
                plain(p.spec, prompt_of(60 + number, 1900), tokens=1)
        finally:
            d.thaw()
        text = text_of(response.result())

    assert text == plain(reference, prompt)
    assert d.now(lost("lease")) == failed + 1
    wait_until(lambda: d.now(LINGERING) == 0, seconds=5, what="no block lingers")
    at_rest(p, d)


@both
def test_aborted(pair, reference):
    """The client leaves while P is stopped: no block is used for anything else before P has let go of it."""
    p, d, mode = pair
    prompt = prompt_of(70, 900)
    if mode is TransferMode.PUSH:
        transfer = {"transfer_id": "aborted"}
        params = OPEN | transfer | meet(p.spec, d.spec, 1) | {"do_remote_prefill": True, "do_remote_decode": False}
    else:
        params = prefill(p.spec, prompt)
    with p.frozen():
        hang_up(d.spec, decode_body(prompt, params), 0.5)
    others = [prompt_of(80 + number, 700) for number in range(3)]

    assert [plain(d.spec, other) for other in others] == [plain(reference, other) for other in others]
    at_rest(p, d)


@pull
def test_killed_before_the_read(pair, reference):
    """D computes the prompt by itself; the next prefill engine at that address has other states."""
    p, d, _ = pair
    prompt = prompt_of(90, 400)
    params = prefill(p.spec, prompt)
    p.kill()
    response = decode(d.spec, prompt, params)
    p.start()
    p.fleet.wait_ready([p.child], timeout_s=300)

    assert text_of(response) == plain(reference, prompt)
    assert differences(asked(pair, prompt_of(91)), answer(reference, prompt_of(91))) == []
    at_rest(p, d)
