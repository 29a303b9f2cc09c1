"""What a running router has measured of its hand-overs: ``xpyd_handoff_gap_seconds`` at ``/metrics``."""

import re
import urllib.request
from typing import Final

from xpyd_connector.core.doctor.router_times import DECODE_STEP, RouterTimes
from xpyd_connector.errors import Unreachable

MOST_BYTES: Final = 16 << 20  # of /metrics
TIMEOUT: Final = 10.0  # s
_BUCKET: Final = re.compile(r'^xpyd_handoff_gap_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} ([0-9.e+]+)', re.MULTILINE)


def read_router(url: str, *, lease: float, handoff_timeout: float) -> RouterTimes:
    """Ask a router; raises :exc:`~xpyd_connector.errors.Unreachable`. No endpoint of it shows its settings."""
    if not url.startswith(("http://", "https://")):
        raise Unreachable(f"--router is {url!r}; it must be a URL such as http://router:8000")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=TIMEOUT) as answer:
            text = answer.read(MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError) as exc:  # URLError is an OSError
        raise Unreachable(f"the router at {url} does not show its metrics: {exc}") from exc
    return times_in(text, lease=lease, handoff_timeout=handoff_timeout)


def times_in(text: str, *, lease: float, handoff_timeout: float) -> RouterTimes:
    """Count the hand-overs that left a decode engine less than a step of the lease (Prometheus text format)."""
    buckets = sorted((float(bound), float(count)) for bound, count in _BUCKET.findall(text))
    if not buckets:
        return RouterTimes(lease, handoff_timeout)
    total = buckets[-1][1]
    bound, within = max(
        ((bound, count) for bound, count in buckets if bound <= max(lease - DECODE_STEP, 0)), default=(0.0, total)
    )
    return RouterTimes(lease, handoff_timeout, int(total), int(total - within), bound)
