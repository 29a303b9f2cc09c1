"""Models with a state and with windows under faults: what protects KV protects those, too. Never a wrong text."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.architectures import ARCHITECTURES, make
from support.attention import ATTENTION
from support.cluster import OVER_TCP, engine_spec, nothing_held, start_engine, wait_until
from support.legs import OPEN, decode, decode_body, plain, prefill, prompt_of, push, text_of
from support.netns import lab_available, lab_or_none
from support.questions import ask, client, differences, ids
from support.shapes import meet
from support.victims import BORROWING, LATE, LEASE, LINGERING, LOADS, LONG, PATIENT, Victim, hang_up, lost

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.thorough]  # minutes
PREEMPTIONS = "vllm:num_preemptions_total"
# A cache that four long answers do not fit into. With longer steps vLLM would ask for more than one with windows has.
STEPS = ("--max-num-batched-tokens", "256")
OPTIONS = {
    "granitemoehybrid": (*STEPS, "--no-enable-prefix-caching", "--num-gpu-blocks-override", "40"),
    "gpt_oss": (*STEPS, "--num-gpu-blocks-override", "90"),
}
MODELS = {label: (ARCHITECTURES | ATTENTION)[label] for label in OPTIONS}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Where the models are."""
    return {label: make(MODELS[label], tmp_path_factory.mktemp("model") / label) for label in MODELS}


@pytest.fixture(scope="module")
def reference(fleet, made, pair):
    """An engine without a connector, of the model that the pair has."""
    *_, label = pair
    spec = engine_spec(f"{label}-reference", made[label], extra_args=OPTIONS[label])
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=300)
    yield spec
    fleet.stop(child)


@pytest.fixture(scope="module")
def lab():
    """Two hosts with a network between them that can be cut, or None where that cannot be had."""
    with lab_or_none() as lab:
        yield lab


@pytest.fixture(scope="module")
def pair(request, fleet, made, lab):
    """P and D; what is read from a stopped P comes when it runs again."""
    label, mode = request.param
    config = {"kv_lease_duration": LEASE, "transfer_timeout": PATIENT, "registration_timeout": PATIENT}
    config |= {"retry_after": 0.1}
    places = {"p": lab.p.options, "d": lab.d.options} if lab else {side: {"extra_env": OVER_TCP} for side in "pd"}
    p, d = (
        Victim(
            engine_spec(
                f"{label}-{mode.value}-{side}", made[label], connector=Connector.PDRELAY, mode=mode,
                extra_connector_config=config, extra_args=OPTIONS[label], **places[side],
            ),
            fleet,
        )
        for side in "pd"
    )  # fmt: skip
    for victim in (p, d):
        victim.start()
    fleet.wait_ready([victim.child for victim in (p, d)], timeout_s=300)
    yield p, d, mode, label
    fleet.stop(*(victim.child for victim in (p, d) if victim.child in fleet.children))


pairs = pytest.mark.parametrize(
    "pair", [(label, mode) for label in MODELS for mode in TransferMode], indirect=True, scope="module", ids="-".join
)


fresh = itertools.count(100)  # numbers of prompts that neither engine has in its cache


def meets(pair, reference):
    """Wait until D loads a prompt from P; its text is right in any case."""
    p, d, *_ = pair

    def loads():
        before = d.now(LOADS)
        prompt = prompt_of(next(fresh))
        question = ids(prompt)
        params = prefill(p.spec, prompt)
        with client(d.spec.base_url) as ours, client(reference.base_url) as theirs:
            assert differences(ask(ours, question, kv_transfer_params=params), ask(theirs, question)) == []
        return d.now(LOADS) == before + 1

    wait_until(loads, seconds=LONG, what="D loads from P")


def reuse_blocks(p):
    """Wait until P has freed what D had leased, and have it use every block for other prompts."""
    wait_until(lambda: nothing_held(p.spec), seconds=LEASE + LATE, what="P frees what D had leased")
    for _ in range(3):
        plain(p.spec, prompt_of(next(fresh), 1900), tokens=1)


def at_rest(*victims):
    for victim in victims:
        wait_until(lambda v=victim: nothing_held(v.spec), seconds=LONG, what=f"{victim.spec.name} holds nothing")


@pairs
def test_preempted(pair, reference):
    """A cache that four prompts fit into, but not their long answers: preempted requests compute their states again."""
    p, d, mode, _ = pair
    where = meet(p.spec, d.spec, 1) if mode is TransferMode.PUSH else None
    prompts = [prompt_of(number, 300 + 40 * number) for number in range(4)]
    before = d.now(PREEMPTIONS) + p.now(PREEMPTIONS)

    def both_legs(prompt):
        question = ids(prompt)
        if where is not None:
            return push(p.spec, d.spec, question, where, tokens=500)[0]
        params = prefill(p.spec, prompt)
        with client(d.spec.base_url) as api:
            return ask(api, question, tokens=500, kv_transfer_params=params)

    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(both_legs, prompts))
    with client(reference.base_url) as api:
        theirs = [ask(api, ids(prompt), tokens=500) for prompt in prompts]

    assert [our.text for our in ours] == [their.text for their in theirs]
    assert d.now(PREEMPTIONS) + p.now(PREEMPTIONS) > before
    at_rest(p, d)


@pairs
def test_frozen_in_the_middle_of_a_transfer(pair, reference):
    """D sleeps for longer than the lease, and P uses every block for other prompts: what came is discarded."""
    p, d, *_ = pair
    prompt = prompt_of(50, 900)
    meets(pair, reference)
    params = prefill(p.spec, prompt)
    failed = d.now(lost("lease"))
    with ThreadPoolExecutor(1) as pool:
        with p.frozen():
            response = pool.submit(decode, d.spec, prompt, params)
            wait_until(lambda: d.now(BORROWING) == 1, seconds=LONG, what="D waits for the transfer")
            d.freeze()
        try:
            reuse_blocks(p)
        finally:
            d.thaw()
        text = text_of(response.result())

    assert text == plain(reference, prompt)
    assert d.now(lost("lease")) == failed + 1
    wait_until(lambda: d.now(LINGERING) == 0, seconds=LONG, what="no block lingers")
    at_rest(p, d)


@pairs
def test_cut_in_the_middle_of_a_transfer(lab, pair, reference):
    """The lease is over before the rest can come, and P uses the blocks: what comes then is discarded."""
    if lab is None:
        pytest.skip(f"no network lab: {lab_available()}")
    p, d, *_ = pair
    prompt = prompt_of(95, 900)
    meets(pair, reference)
    params = prefill(p.spec, prompt)
    failed = d.now(lost("lease"))
    lab.limit(1)  # 1 MB takes 9 s
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(decode, d.spec, prompt, params)
        try:
            wait_until(lambda: d.now(BORROWING) == 1, seconds=LONG, what="D waits for the transfer")
            time.sleep(0.5)
            lab.cut()  # for less than the 20 s after which TCP gives a peer up, and a push keeps blocks for minutes
            reuse_blocks(p)
        finally:
            lab.heal()
            lab.limit(None)
        text = text_of(response.result())

    assert text == plain(reference, prompt)
    assert d.now(lost("lease")) == failed + 1
    wait_until(lambda: stepped(d, LINGERING) == 0, seconds=LONG, what="no block lingers")
    meets(pair, reference)
    at_rest(p, d)


def stepped(victim, name):
    """Return a metric after a step of an engine, with which vLLM collects it."""
    plain(victim.spec, prompt_of(93, 20), tokens=1)
    return victim.now(name)


@pairs
def test_aborted(pair, reference):
    """The client leaves while P is stopped: no block is used for anything else before P has let go of it."""
    p, d, mode, _ = pair
    prompt = prompt_of(70, 900)
    if mode is TransferMode.PUSH:
        transfer = {"transfer_id": "aborted"}
        params = OPEN | transfer | meet(p.spec, d.spec, 1) | {"do_remote_prefill": True, "do_remote_decode": False}
    else:
        params = prefill(p.spec, prompt)
    with p.frozen():
        hang_up(d.spec, decode_body(prompt, params), until=lambda: d.now(BORROWING) == 1)
    others = [prompt_of(80 + number, 700) for number in range(3)]

    assert [plain(d.spec, other) for other in others] == [plain(reference, other) for other in others]
    at_rest(p, d)


@pairs
@pytest.mark.parametrize("when", ["before", "during"])
def test_killed(pair, reference, when):
    """D computes the prompt by itself; the next prefill engine at that address has other states."""
    p, d, *_ = pair
    prompt = prompt_of({"before": 90, "during": 91}[when], 900)
    meets(pair, reference)
    params = prefill(p.spec, prompt)
    with ThreadPoolExecutor(1) as pool:
        if when == "during":
            p.freeze()
            response = pool.submit(decode, d.spec, prompt, params)
            wait_until(lambda: d.now(BORROWING) == 1, seconds=LONG, what="D waits for the transfer")
            p.kill()
        else:
            p.kill()
            response = pool.submit(decode, d.spec, prompt, params)
        text = text_of(response.result())
    p.start()
    p.fleet.wait_ready([p.child], timeout_s=300)

    assert text == plain(reference, prompt)
    meets(pair, reference)
    at_rest(p, d)
