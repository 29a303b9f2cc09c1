"""Reads which engines served a request, and how much KV moved, from headers and metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdrelay_proxy.core.fleet.engine_metrics import metric_values

BYTES_MOVED = (b"vllm:pdrelay_bytes_transferred_total", b"vllm:nixl_bytes_transferred_sum")


@dataclass(frozen=True, slots=True)
class LegTiming:
    """One engine's part in a request."""

    engine: str  # its name in the router
    ms: float | None  # None: the router did not say


def parse_server_timing(header: str) -> dict[str, LegTiming]:
    """Read a Server-Timing header (W3C): `prefill;desc="prefill-0";dur=41.2, decode;desc="d-0"`.

    Entries of another form are left out.
    """
    legs: dict[str, LegTiming] = {}
    for match in re.finditer(r'(\w+);desc="([^"]*)"(?:;dur=(\d+(?:\.\d+)?))?', header):
        name, engine, ms = match.groups()
        legs[name] = LegTiming(engine, float(ms) if ms else None)
    return legs


def metric_total(exposition: bytes, names: Sequence[bytes] = BYTES_MOVED) -> int | None:
    """Sum the first of these metrics that a text has, over its labels; None: it has none."""
    for name in names:
        if values := metric_values(exposition, name):
            return int(sum(values))
    return None
