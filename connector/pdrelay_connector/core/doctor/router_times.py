"""Compares leases with a router's times: a lease is not renewed between the legs of a request."""

from dataclasses import dataclass
from typing import Final

from pdrelay_connector.core.doctor.finding import Finding

DECODE_STEP: Final = 5.0  # s of a lease that are left to the decode engine's longest step
HANDOFF_SHARE: Final = 2 / 3  # of a lease: until then our router hands a prompt over


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """The measured times of the router, in seconds."""

    lease: float = 30.0  # kv_lease_duration of the engines
    handoffs: int = 0  # that it has counted
    slow_handoffs: int = 0  # of these, how many took longer than ``slow``
    slow: float = 0.0


def diagnose_router(times: RouterTimes) -> list[Finding]:
    """Return findings if a router's hand-overs take too long for the engines' leases."""
    findings: list[Finding] = []
    handoff = times.lease * HANDOFF_SHARE
    if handoff + DECODE_STEP > times.lease:
        findings.append(
            Finding(
                "lease-handoff",
                f"a lease lasts {times.lease:g} s, and the router may hand a request over "
                f"{handoff:g} s after its prefill, which leaves less than {DECODE_STEP:g} s to a "
                "step of the decode engine",
                f"set kv_lease_duration to {DECODE_STEP / (1 - HANDOFF_SHARE):g} or more",
            )
        )
    if times.slow_handoffs:
        findings.append(
            Finding(
                "slow-handoffs",
                f"the router took longer than {times.slow:g} s for {times.slow_handoffs} of "
                f"{times.handoffs} hand-overs, and a lease lasts {times.lease:g} s",
                "give the router more CPU (--workers) or set kv_lease_duration higher",
            )
        )
    return findings
