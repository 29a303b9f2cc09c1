"""``xpyd prove`` on real engines: green for ours, and a connector with a fault is found."""

import json
from contextlib import contextmanager

import pytest

from support.cluster import OVER_TCP, engine_spec, faulty_decode
from support.restarting import restartable
from xpyd_proxy.cli import main
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.local.recipe import Connector, Role

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


def findings(page):
    """What was found: check/finding -> what was seen."""
    return {
        f"{check['name']}/{found['name']}": found["seen"] for check in page["checks"] for found in check["findings"]
    }


QUICK = [f"--only={name}" for name in ("lengths", "boundaries", "prefix-hits", "burst", "abandoned-streams", "refused")]


def test_pull_is_green(prove, engines):
    """2P2D, as a router would use them: equal, and nothing is held."""
    code, page = prove([engines.p0, engines.p1], [engines.d0, engines.d1], engines.reference, *QUICK)

    assert findings(page) == {}
    assert code == 0


@pytest.mark.thorough  # two minutes: it waits for a lease, and these engines are no faster for it
def test_push_is_green(prove, pushing, engines):
    """All checks where prefill engines write, chunk by chunk and whole requests at once."""
    code, page = prove([pushing.chunk, pushing.request], [pushing.d0, pushing.d1], engines.reference)

    assert findings(page) == {}
    assert code == 0


@pytest.mark.thorough  # an engine of its own for a fault that the tests without engines show, too
def test_one_wrong_block_in_a_hundred_is_found(prove, fleet, model, engines):
    """Every answer has status 200."""
    with faulty_decode(fleet, model, "one-percent", "SpoilingConnector", SPOILT_SHARE="0.01") as spec:
        code, page = prove([engines.p0], [spec], engines.reference, "--only=equality", "--only=burst", "--only=waves")

    assert code == 1
    assert {name.split("/")[1] for name in findings(page)} <= {"wrong-text", "wrong-logprobs"}


LEASE = 8  # s; vLLM's connector renews at most every 5 s
READY_S = 300.0


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
    with pair(tmp_path, model, Connector.XPYD, mode) as (specs, flags):
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
