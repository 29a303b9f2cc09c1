"""The suite against simulated engines: green for those that are well, and each fault has its name."""

import time

import pytest
from starlette.responses import Response

from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import serving

pytestmark = pytest.mark.processes


# For blocks that never come back: both are waited for.
SHORT = ("--idle-seconds", "0.5", "--lease-seconds", "0.5")
# For checks that wait for leases to end, of engines that free their blocks: a busy machine may see that late.
BRIEF = ("--idle-seconds", "10", "--lease-seconds", "0.5")
# For checks that wait for no lease.
LONG = ("--idle-seconds", "10", "--lease-seconds", "30")


def but_slow(findings):
    """Leave out answers that took half a second, a short lease: so long may a busy machine keep an engine from one."""
    return {check: [name for name in names if name != "slow-answer"] for check, names in findings.items()}


def prove_calm(prove, *arguments):
    """Prove; again where an answer took as long as a short lease. Engines that are slow are so each time."""
    for _ in range(5):
        found = prove(*arguments)
        if found.findings == but_slow(found.findings):
            break
    return found


def test_engines_that_are_well_are_green(prove, fleet):
    """And the suite keeps a router's rules while it plays one: simulated decode engines insist on them."""
    found = prove("--skip", "handovers", "--skip", "faults", *LONG)

    assert {name: names for name, names in found.findings.items() if names} == {}
    assert found.code == 0
    assert fleet.d.violations == []
    assert [load["failed"] for load in found.page["loads"]] == [0, 0]


def test_one_wrong_text_of_many_is_found(prove, fleet):
    """HTTP 200, and the text of another prompt."""
    fleet.d.inject(SimulatedFault(FaultKind.WRONG, times=1))
    found = prove("--only", "burst", *LONG)

    assert (found.code, found.findings) == (1, {"burst": ["wrong-text"]})
    assert found.page["checks"][0]["findings"][0]["seen"].startswith("1 of 24")


def test_blocks_that_are_never_freed_are_found_once(prove, fleet):
    """By the check that left them; the next one begins with what is held then."""
    fleet.p.inject(SimulatedFault(FaultKind.KEEP))
    found = prove("--only", "boundaries", "--only", "refused", *SHORT)

    assert found.code == 1
    assert but_slow(found.findings) == {"boundaries": ["blocks-never-freed"], "refused": ["blocks-never-freed"]}
    first, second = (check["findings"][-1]["seen"] for check in found.page["checks"])  # slow answers stand before it
    assert "prefill-0 still held 1.50% of its KV cache" in first
    assert "0.70%" in second


@pytest.mark.parametrize(("lease_s", "name"), [(4.0, "blocks-stranded"), (20.0, "blocks-held")])
def test_blocks_that_stay_until_their_lease_ends_are_stranded(prove, fleet, lease_s, name):
    """They come back by themselves, and too late."""
    looks = []

    async def giving_back(scope, receive, send):
        if scope.get("path") == "/metrics" and fleet.p.granted:
            looks.append(time.monotonic())
            if len(looks) > 10 and looks[-1] - looks[0] > 3.0:  # more than two thirds of the short lease
                fleet.p.inject(None)
        await fleet.p(scope, receive, send)

    fleet.p.inject(SimulatedFault(FaultKind.KEEP))
    with serving(giving_back) as at:
        fleet.at["p0"] = f"http://{at}"
        found = prove("--only", "refused", "--idle-seconds", "0.4", "--lease-seconds", f"{lease_s}")

    assert (found.code, found.findings) == (1, {"refused": [name]})
    (seen,) = (each["seen"] for each in found.page["checks"][0]["findings"])
    assert "after the last request was over" in seen
    assert ("until leases of 4 s had ended" in seen) == (name == "blocks-stranded")


def test_an_engine_that_hangs_is_found(prove, fleet):
    """One silent answer among many; its client has left, so nothing is held."""
    fleet.d.inject(SimulatedFault(FaultKind.STALL, times=1))
    found = prove("--only", "burst", "--timeout", "4", *LONG)

    assert (found.code, found.findings) == (1, {"burst": ["no-answer"]})


def test_errors_and_broken_answers_are_found(prove, fleet):
    fleet.d.inject(SimulatedFault(FaultKind.STATUS, status=500, times=2))
    assert prove("--only", "burst", *LONG).findings == {"burst": ["request-failed"]}

    fleet.d.inject(SimulatedFault(FaultKind.END, after=0, times=2))
    assert prove("--only", "waves", *LONG).findings == {"waves": ["malformed-answer"]}


def test_findings_of_nonsense_are_counted_among_its_own_bodies(prove, fleet):
    """Not among all requests of the run so far."""
    fleet.d.inject(SimulatedFault(FaultKind.STATUS))
    found = prove("--only", "many", "--only", "nonsense")

    (nonsense,) = (check for check in found.page["checks"] if check["name"] == "nonsense")
    assert nonsense["findings"][0]["seen"].startswith("11 of 22: decode-0, no JSON: HTTP 500")


def test_a_prefill_engine_without_a_connector_is_said(prove, fleet):
    """The commonest mistake."""
    fleet.p.inject(SimulatedFault(FaultKind.STATUS, status=200, body='{"choices": []}'))
    found = prove("--only", "refused", *LONG)

    assert found.code == 1
    assert "has it a KV connector?" in str(found.page)


def test_after_an_engine_is_down_nothing_more_is_checked(prove, fleet):
    """One finding, and not one for each check that follows."""
    fleet.d.inject(SimulatedFault(FaultKind.ILL))
    found = prove("--only", "boundaries", "--only", "burst", *LONG)

    assert found.findings["boundaries"][-1] == "engine-down"
    assert found.page["checks"][1]["state"] == "skipped"
    assert found.page["checks"][1]["reason"] == "decode-0 is down since the check boundaries"


def test_what_takes_too_long_is_left_out(prove):
    """Ten minutes are ten minutes; the page says what was not done, and nothing done is not green."""
    found = prove("--only", "load", "--seconds", "1")

    assert found.code == 2
    assert found.page["checks"][0]["state"] == "skipped"
    assert "--seconds" in found.page["checks"][0]["reason"]


DEEDS = [f"--{deed}-{role}=true" for role in ("prefill", "decode") for deed in ("kill", "freeze", "thaw", "restart")]


def test_every_fault_can_be_tried(prove):
    """With commands that do nothing, as the engines are well: all checks run, and all are green."""
    found = prove_calm(prove, "--only", "handovers", "--only", "faults", *DEEDS, *BRIEF)

    assert {name: names for name, names in found.findings.items() if names} == {}
    assert {check["state"] for check in found.page["checks"]} == {"passed"}
    assert found.code == 0


def test_a_prefill_engine_that_shows_no_blocks_is_not_said_to_hold_any(prove, fleet):
    """It is said to be without metrics; a decode engine that dies says nothing about it."""

    async def without_metrics(scope, receive, send):
        if scope.get("path") == "/metrics":
            await Response(status_code=404)(scope, receive, send)
        else:
            await fleet.p(scope, receive, send)

    with serving(without_metrics) as at:
        fleet.at["p0"] = f"http://{at}"
        found = prove_calm(prove, "--only", "decode-killed", *DEEDS, *BRIEF)

    assert "Without vLLM's metrics: prefill-0" in found.said.err
    assert (found.code, found.findings) == (0, {"decode-killed": []})


@pytest.mark.parametrize("name", ["busy-left", "decode-killed"])
def test_a_decode_engine_is_measured_before_prompts_are_computed_for_it(prove, fleet, name):
    """On a slow machine the leases of those prompts were over before the engine died: no stranded block was found."""
    asked = []

    def noting(role, engine):
        async def app(scope, receive, send):
            if scope.get("path") == "/v1/completions":
                asked.append(role)
            await engine(scope, receive, send)

        return app

    with serving(noting("prefill", fleet.p)) as p, serving(noting("decode", fleet.d)) as d:
        fleet.at |= {"p0": f"http://{p}", "d0": f"http://{d}"}
        prove("--only", name, *DEEDS, *BRIEF)

    assert asked[:2] == ["decode", "prefill"]


def test_a_wrong_text_after_a_freeze_is_found(prove, fleet):
    """Status 200 and the text of another prompt: what KV read too late gives."""
    fleet.d.inject(SimulatedFault(FaultKind.WRONG))
    found = prove("--only", "decode-frozen", *DEEDS, *BRIEF)

    assert (found.code, but_slow(found.findings)) == (1, {"decode-frozen": ["wrong-text"]})


def test_params_of_another_request_that_are_believed_are_found(prove, fleet):
    fleet.d.inject(SimulatedFault(FaultKind.WRONG))
    found = prove("--only", "mixed-up", *BRIEF)

    assert (found.code, but_slow(found.findings)) == (1, {"mixed-up": ["wrong-text"]})


def test_a_command_that_fails_is_no_finding(prove):
    """The engines are not to blame, and the run is not green either."""
    found = prove("--only", "decode-frozen", "--freeze-decode", "exit 3", "--thaw-decode", "true", *BRIEF)

    assert found.code == 2
    assert "--freeze-decode ended with 3" in found.page["checks"][0]["reason"]


def test_what_nothing_can_be_done_to_is_skipped(prove):
    found = prove("--only", "faults", "--only", "refused", "--skip", "busy-left", *LONG)

    assert found.code == 0
    assert {check["state"] for check in found.page["checks"] if check["group"] == "faults"} == {"skipped"}


CALIBRATION = 12  # requests that the reference gets before the first check


def test_what_the_reference_does_not_answer_is_not_green(prove, fleet):
    """Else a decode engine may answer with any text as soon as the reference is ill: nothing is compared."""
    fleet.reference.inject(SimulatedFault(FaultKind.STATUS, passes=CALIBRATION))
    fleet.d.inject(SimulatedFault(FaultKind.WRONG))
    found = prove("--only", "burst", *LONG)

    assert (found.code, found.page["checks"][0]["state"]) == (2, "aborted")
    assert "24 of 24 answers were compared with nothing" in found.page["checks"][0]["reason"]
    assert "HTTP 500" in found.page["checks"][0]["reason"]


def test_what_was_found_beside_it_stays(prove, fleet):
    """A reference that misses one answer hides no finding of the others."""
    fleet.reference.inject(SimulatedFault(FaultKind.STATUS, passes=CALIBRATION, times=1))
    fleet.d.inject(SimulatedFault(FaultKind.WRONG, passes=12, times=1))
    found = prove("--only", "burst", *LONG)

    assert (found.code, found.findings) == (1, {"burst": ["wrong-text"]})
    assert "1 of 24 answers were compared with nothing" in found.page["checks"][0]["reason"]


def test_features_of_an_ill_reference_are_not_left_out(prove, fleet):
    """A refusal (4xx) says that it does not serve them; an error does not."""
    fleet.reference.inject(SimulatedFault(FaultKind.STATUS, passes=CALIBRATION))
    found = prove("--only", "seeds", *LONG)
    assert (found.code, found.page["checks"][0]["state"]) == (2, "aborted")

    fleet.reference.inject(SimulatedFault(FaultKind.STATUS, status=400, passes=CALIBRATION))
    assert prove("--only", "seeds", "--seed", "8", *LONG).page["checks"][0]["state"] == "skipped"


def test_an_engine_that_shows_nothing_any_more_is_not_idle(prove, fleet):
    """It showed its blocks at the beginning, so what it holds now is not known: that is not green."""
    fleet.p.inject(SimulatedFault(FaultKind.MUTE))
    found = prove("--only", "refused", *SHORT)

    assert (found.code, but_slow(found.findings)) == (1, {"refused": ["blocks-unseen"]})
    assert "HTTP 500" in found.page["checks"][0]["findings"][-1]["seen"]
