"""Reads a router's hand-over times: the histogram ``pdrelay_handoff_gap_seconds``."""

import re
import threading
import urllib.request
from collections.abc import Generator
from http.client import HTTPException
from math import isfinite, isnan
from typing import Final
from urllib.error import HTTPError

from pdrelay_connector.core.doctor.router_times import DECODE_STEP, RouterTimes
from pdrelay_connector.errors import Unreachable

MOST_BYTES: Final = 16 << 20  # of /metrics
TIMEOUT: Final = 10.0  # s
_NAME: Final = "pdrelay_handoff_gap_seconds"
_BOUND: Final = re.compile(r'[{,]le="([^"]*)"')


def read_router(url: str, *, lease: float, timeout: float = TIMEOUT) -> RouterTimes:
    """Read a router's metrics; raises :exc:`~pdrelay_connector.errors.Unreachable`.

    ``lease``: of the engines, because no endpoint of the router shows it.
    """
    if not url.startswith(("http://", "https://")):
        raise Unreachable(f"--router is {url!r}; it must be a URL such as http://router:8000")
    text = _fetch(f"{url.rstrip('/')}/metrics", url, timeout)
    if _NAME not in text:
        raise Unreachable(f"the metrics of {url} have no {_NAME}: is it a router?")
    return times_in(text, lease=lease)


def _fetch(address: str, url: str, timeout: float) -> str:
    """Read a whole answer in a daemon thread: urllib's timeout only limits each single read."""
    contents = list[bytes]()
    failed = list[Exception]()

    def fetch() -> None:
        try:
            with urllib.request.urlopen(address, timeout=timeout) as answer:
                contents.append(answer.read(MOST_BYTES + 1))
        except (OSError, ValueError, HTTPException) as exc:  # URLError is an OSError
            failed.append(exc)
            if isinstance(exc, HTTPError):  # it is the response, too
                exc.close()

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(timeout)
    if failed:
        raise Unreachable(
            f"the router at {url} does not show its metrics: {failed[0]}"
        ) from failed[0]
    if not contents:
        raise Unreachable(f"the router at {url} gave no whole answer within {timeout:g} s")
    if len(contents[0]) > MOST_BYTES:
        raise Unreachable(f"the metrics of {url} are more than {MOST_BYTES} bytes: is it a router?")
    return contents[0].decode(errors="replace")


def times_in(text: str, *, lease: float) -> RouterTimes:
    """Count the hand-overs after which less than a decode step was left of the lease."""
    buckets = sorted(_buckets(text))
    if not buckets:
        return RouterTimes(lease)
    total = buckets[-1][1]
    bound, within = max(
        ((bound, count) for bound, count in buckets if bound <= max(lease - DECODE_STEP, 0)),
        default=(0.0, total),
    )
    return RouterTimes(lease, int(total), int(total - within), bound)


def _buckets(text: str) -> Generator[tuple[float, float]]:
    """Yield the bounds (s) and counts of the histogram's buckets."""
    for line in text.splitlines():
        if not line.startswith(f"{_NAME}_bucket{{"):
            continue
        labels, _, number = line.rpartition("} ")
        if (match := _BOUND.search(labels)) is None:
            continue
        try:
            bound = float(match[1])
            count = float(number)
        except ValueError:
            continue
        if isfinite(count) and not isnan(bound):
            yield bound, count
