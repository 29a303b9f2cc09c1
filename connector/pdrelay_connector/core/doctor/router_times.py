"""A lease against the times of a router: nobody renews it between the two legs of a request."""

from dataclasses import dataclass
from typing import Final

from pdrelay_connector.core.doctor.finding import Finding

DECODE_STEP: Final = 5.0  # s of a lease that are left to the decode engine's longest step


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """What is known of the router (s)."""

    lease: float = 30.0  # kv_lease_duration of the engines
    handoff_timeout: float = 20.0  # of the router
    handoffs: int = 0  # that it has counted
    slow_handoffs: int = 0  # of these, how many took longer than ``slow``
    slow: float = 0.0


def diagnose_router(times: RouterTimes) -> list[Finding]:
    """Compare the engines' lease with what a router needs: nobody renews it between the two legs."""
    found: list[Finding] = []
    if times.handoff_timeout + DECODE_STEP > times.lease:
        found.append(
            Finding(
                "lease-handoff",
                f"a lease lasts {times.lease:g} s, and the router may hand a request over {times.handoff_timeout:g} s "
                f"after its prefill, which leaves less than {DECODE_STEP:g} s to a step of the decode engine",
                f"set kv_lease_duration to {times.handoff_timeout + 2 * DECODE_STEP:g} or more, or --handoff-timeout "
                f"to {max(times.lease - 2 * DECODE_STEP, 0.5):g}",
            )
        )
    if times.slow_handoffs:
        found.append(
            Finding(
                "slow-handoffs",
                f"the router took longer than {times.slow:g} s for {times.slow_handoffs} of {times.handoffs} "
                f"hand-overs, and a lease lasts {times.lease:g} s",
                "give the router more CPU (--workers) or set kv_lease_duration higher",
            )
        )
    return found
