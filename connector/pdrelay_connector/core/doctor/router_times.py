"""A lease against the times of a router: nobody renews it between the two legs of a request."""

from dataclasses import dataclass
from typing import Final

from pdrelay_connector.core.doctor.finding import Finding

DECODE_STEP: Final = 5.0  # s of a lease that are left to the decode engine's longest step
HANDOFF_SHARE: Final = 2 / 3  # of a lease: until then our router hands a prompt over


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """What is known of the router (s)."""

    lease: float = 30.0  # kv_lease_duration of the engines
    handoffs: int = 0  # that it has counted
    slow_handoffs: int = 0  # of these, how many took longer than ``slow``
    slow: float = 0.0


def diagnose_router(times: RouterTimes) -> list[Finding]:
    """Compare the engines' lease with what a router needs: nobody renews it between the two
    legs.
    """
    found: list[Finding] = []
    handoff = times.lease * HANDOFF_SHARE
    if handoff + DECODE_STEP > times.lease:
        found.append(
            Finding(
                "lease-handoff",
                f"a lease lasts {times.lease:g} s, and the router may hand a request over "
                f"{handoff:g} s "
                f"after its prefill, which leaves less than {DECODE_STEP:g} s to a step of the "
                f"decode engine",
                f"set kv_lease_duration to {DECODE_STEP / (1 - HANDOFF_SHARE):g} or more",
            )
        )
    if times.slow_handoffs:
        found.append(
            Finding(
                "slow-handoffs",
                f"the router took longer than {times.slow:g} s for {times.slow_handoffs} of "
                f"{times.handoffs} "
                f"hand-overs, and a lease lasts {times.lease:g} s",
                "give the router more CPU (--workers) or set kv_lease_duration higher",
            )
        )
    return found
