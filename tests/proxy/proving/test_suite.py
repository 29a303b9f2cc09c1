"""The suite against simulated engines: green for those that are well, and each fault has its name."""

from xpyd_proxy.testing.engine import FaultKind, SimulatedFault

SHORT = ("--idle-seconds", "0.5", "--lease-seconds", "0.5")


def test_engines_that_are_well_are_green(prove, fleet):
    """And the suite keeps a router's rules while it plays one: simulated decode engines insist on them."""
    found = prove(*SHORT)

    assert {name: names for name, names in found.findings.items() if names} == {}
    assert found.code == 0
    assert fleet.d.violations == []
    assert [load["failed"] for load in found.page["loads"]] == [0, 0]


def test_one_wrong_text_of_many_is_found(prove, fleet):
    """HTTP 200, and the text of another prompt."""
    fleet.d.inject(SimulatedFault(FaultKind.WRONG, times=1))
    found = prove("--only", "burst", *SHORT)

    assert (found.code, found.findings) == (1, {"burst": ["wrong-text"]})
    assert found.page["checks"][0]["findings"][0]["seen"].startswith("1 of 24")


def test_blocks_that_are_never_freed_are_found_once(prove, fleet):
    """By the check that left them; the next one begins with what is held then."""
    fleet.p.inject(SimulatedFault(FaultKind.KEEP))
    found = prove("--only", "boundaries", "--only", "refused", *SHORT)

    assert found.code == 1
    assert found.findings == {"boundaries": ["blocks-never-freed"], "refused": ["blocks-never-freed"]}
    assert "prefill-0 still held 1.50% of its KV cache" in found.page["checks"][0]["findings"][0]["seen"]
    assert "0.70%" in found.page["checks"][1]["findings"][0]["seen"]


def test_an_engine_that_hangs_is_found(prove, fleet):
    """One silent answer among many; its client has left, so nothing is held."""
    fleet.d.inject(SimulatedFault(FaultKind.STALL, times=1))
    found = prove("--only", "burst", "--timeout", "1", *SHORT)

    assert (found.code, found.findings) == (1, {"burst": ["no-answer"]})


def test_errors_and_broken_answers_are_found(prove, fleet):
    fleet.d.inject(SimulatedFault(FaultKind.STATUS, status=500, times=2))
    assert prove("--only", "burst", *SHORT).findings == {"burst": ["request-failed"]}

    fleet.d.inject(SimulatedFault(FaultKind.END, after=0, times=2))
    assert prove("--only", "waves", *SHORT).findings == {"waves": ["malformed-answer"]}


def test_a_prefill_engine_without_a_connector_is_said(prove, fleet):
    """The commonest mistake."""
    fleet.p.inject(SimulatedFault(FaultKind.STATUS, status=200, body='{"choices": []}'))
    found = prove("--only", "refused", *SHORT)

    assert found.code == 1
    assert "has it a KV connector?" in str(found.page)


def test_what_takes_too_long_is_left_out(prove):
    """Ten minutes are ten minutes; the page says what was not done, and nothing done is not green."""
    found = prove("--only", "load", "--seconds", "1")

    assert found.code == 2
    assert found.page["checks"][0]["state"] == "skipped"
    assert "--seconds" in found.page["checks"][0]["reason"]
