"""``pdrelay prove`` on real engines: green for ours, and a connector with a fault is found."""

import json
import shlex
import sys
import threading
from contextlib import contextmanager

import psutil
import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector, Role
from support.adapters import MAX_RANK, write_adapter
from support.cluster import OVER_TCP, engine_spec, faulty_decode, free_ports, start_engine
from support.images import make_blip2
from support.restarting import restartable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def prove(tmp_path, capfd):
    """Run the suite against engines; return the exit code and the page."""

    def run(prefill, decode, reference, *arguments):
        page = tmp_path / "page.json"
        urls = [f"--prefill={spec.base_url}" for spec in prefill] + [f"--decode={spec.base_url}" for spec in decode]
        code = main(["prove", *urls, "--reference", reference.base_url, "--report", str(page), *arguments])
        return code, json.loads(page.read_text())

    return run


def states(page):
    """How the checks ended: check -> state."""
    return {check["name"]: check["state"] for check in page["checks"]}


def findings(page):
    """What was found: check/finding -> what was seen."""
    return {
        f"{check['name']}/{found['name']}": found["seen"] for check in page["checks"] for found in check["findings"]
    }


READY_S = 300.0
QUICK = [f"--only={name}" for name in ("lengths", "boundaries", "prefix-hits", "burst", "abandoned-streams", "refused")]


def test_pull_is_green(prove, engines):
    """2P2D, as a router would use them: equal, and nothing is held."""
    code, page = prove([engines.p0, engines.p1], [engines.d0, engines.d1], engines.reference, *QUICK)

    assert findings(page) == {}
    assert code == 0


@pytest.mark.thorough  # two minutes: it waits for a lease, and these engines are no faster for it
def test_push_is_green(prove, pushing, engines):
    """All checks where prefill engines write, chunk by chunk and whole requests at once."""
    code, page = prove([pushing.p0, pushing.p1], [pushing.d0, pushing.d1], engines.reference)

    assert findings(page) == {}
    assert code == 0


@pytest.mark.thorough  # an engine of its own for a fault that the tests without engines show, too
def test_one_wrong_block_in_a_hundred_is_found(prove, fleet, model, engines):
    """Every answer has status 200."""
    with faulty_decode(fleet, model, "one-percent", "SpoilingConnector", SPOILT_SHARE="0.01") as spec:
        code, page = prove([engines.p0], [spec], engines.reference, "--only=equality", "--only=burst", "--only=waves")

    assert code == 1
    assert {name.split("/")[1] for name in findings(page)} <= {"wrong-text", "wrong-logprobs"}


def test_a_router_is_green(prove, engines, two_pairs):
    """It is asked in place of the engines, whose blocks are watched all the same."""
    checks = [f"--only={name}" for name in ("lengths", "abandoned-streams", "refused", "nonsense", "features")]
    code, page = prove(
        [engines.p0, engines.p1], [engines.d0, engines.d1], engines.reference, "--router", two_pairs, *checks
    )

    assert findings(page) == {}
    assert code == 0
    ended = states(page)
    assert {name for name, state in ended.items() if state != "passed"} == {"adapters", "images"}
    assert ended["several-answers"] == "passed"  # which only a router can be asked


@contextmanager
def trio(fleet, model, name, *args):
    """Yield a prefill engine, a decode engine and a single one, with the same arguments."""
    common = {"extra_args": args}
    specs = [engine_spec(f"{name}-alone", model, **common)]
    specs += [engine_spec(f"{name}-{role}", model, role=role, connector=Connector.PDRELAY, **common) for role in Role]
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=READY_S)
    yield specs[1:2], specs[2:], specs[0]
    fleet.stop(*children)


@pytest.mark.thorough  # three engines of its own, half a minute
def test_adapters_are_compared(prove, fleet, model, tmp_path):
    """Each LoRA adapter and the base model are asked the same, one after the other."""
    names = {name: write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))}
    modules = (f"{name}={folder}" for name, folder in names.items())
    with trio(
        fleet, model, "prove-lora", "--enable-lora", "--max-loras", "2", "--max-lora-rank", MAX_RANK,
        "--lora-modules", *modules,
    ) as servers:  # fmt: skip
        code, page = prove(*servers, "--only=adapters", "--only=lengths")

    assert findings(page) == {}
    assert code == 0
    assert states(page) == {"lengths": "passed", "adapters": "passed"}


@pytest.mark.thorough  # three engines of its own, half a minute
def test_images_are_compared(prove, fleet, tmp_path):
    """One in a prompt: vLLM takes no more of this model's, and a question with two is left out."""
    with trio(fleet, make_blip2(tmp_path / "blip2"), "prove-images") as servers:
        code, page = prove(*servers, "--only=images", "--only=lengths")

    assert findings(page) == {}
    assert code == 0
    assert states(page) == {"lengths": "passed", "images": "passed"}
    (notes,) = (check["notes"] for check in page["checks"] if check["name"] == "images")
    assert notes == ["1 of 3 kinds are not served by the reference."]


@contextmanager
def descendants():
    """Collect the processes that are started in the block, by whichever process of ours."""
    own = psutil.Process()
    found = set()
    is_over = threading.Event()
    before = set(own.children(recursive=True))

    def look():
        while not is_over.wait(0.2):
            found.update(set(own.children(recursive=True)) - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def runs(process):
    """Whether a process has not ended; a dead one may wait for init to collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough  # a minute: two engines and a router start as users start them
def test_engines_that_it_starts_are_waited_for_and_are_gone_behind_it(model, tmp_path):
    """``--start "pdrelay up"``, as the documentation has it; up asks a first request when its engines serve."""
    flags = ("--port", "--prefill-port", "--decode-port", "--side-channel-port")
    ports = dict(zip(flags, free_ports(4), strict=True))
    chosen = [f"{flag}={port}" for flag, port in ports.items()]
    command = shlex.join([sys.executable, "-m", "pdrelay_proxy.cli", "up", *chosen, f"--model={model}"])
    urls = [f"{name}=http://127.0.0.1:{ports[f'{name}-port']}" for name in ("--prefill", "--decode")]
    page = tmp_path / "page.json"
    router = f"--router=http://127.0.0.1:{ports['--port']}"
    with descendants() as started:
        code = main(["prove", "--start", command, *urls, router, f"--report={page}", *QUICK])

    found = json.loads(page.read_text())
    assert findings(found) == {}
    assert code == 0
    assert set(states(found).values()) == {"passed"}
    assert len(started) >= 5  # up, two engines of two processes each, the router
    assert [process for process in started if runs(process)] == []


LEASE = 8  # s; vLLM's connector renews at most every 5 s


@contextmanager
def pair(folder, model, connector, mode, **config):
    """A prefill and a decode engine with short leases; yields them, and the flags to freeze, kill and restart them."""
    roles = (Role.PREFILL, Role.DECODE)
    specs = [
        engine_spec(
            f"prove-{connector}-{mode}-{role[0]}",
            model,
            role=role,
            connector=connector,
            mode=mode,
            kv_cache_mib=32,
            extra_env=OVER_TCP,
            extra_connector_config={"kv_lease_duration": LEASE, **config},
        )
        for role in roles
    ]
    with restartable(folder, *specs, timeout_s=READY_S) as found:
        flags = [flag for role, each in zip(roles, found, strict=True) for flag in each.flags(role)]
        yield specs, [*flags, f"--lease-seconds={LEASE}", "--idle-seconds=4"]  # a strand of a lease is longer


FAULTS = ("--only=clients", "--only=features", "--only=handovers", "--only=faults", "--seconds=500")


@pytest.mark.thorough  # minutes for each mode: it waits for leases, and starts engines again
@pytest.mark.parametrize("mode", list(TransferMode))
def test_faults_leave_ours_right(prove, tmp_path, model, reference, mode):
    """Frozen and killed engines, params of other requests and of earlier times: no wrong text, no block that stays."""
    with pair(tmp_path, model, Connector.PDRELAY, mode) as (specs, flags):
        code, page = prove(specs[:1], specs[1:], reference, *FAULTS, *flags)

    assert findings(page) == {}
    assert code == 0


@pytest.mark.thorough  # minutes for each, and these engines burn a core even when idle
@pytest.mark.parametrize(
    ("mode", "names"),
    [
        (
            TransferMode.PULL,
            {"decode-frozen/wrong-text", "mixed-up/wrong-text", "decode-killed/blocks-stranded"},
        ),
        (
            TransferMode.PUSH,
            {"decode-frozen/no-answer", "decode-frozen/blocks-never-freed", "refused/blocks-stranded"},
        ),
    ],
)
def test_the_faults_of_vllms_connectors_are_found(prove, tmp_path, model, reference, mode, names):
    """KV that is read too late, pushes that never come, and blocks that stay until a lease has ended."""
    with pair(tmp_path, model, Connector.NIXL, mode) as (specs, flags):
        code, page = prove(specs[:1], specs[1:], reference, "--timeout=30", *FAULTS, *flags)

    assert findings(page).keys() >= names
    assert code == 1
