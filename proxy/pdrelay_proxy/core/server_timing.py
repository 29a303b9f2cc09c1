"""The Server-Timing header of an answer: its engines, and what each of them took."""

from typing import Final

from pdrelay_proxy.core.milliseconds import written_ms
from pdrelay_proxy.core.model import SingleEngineReason
from pdrelay_proxy.core.request_record import SINGLE, RequestRecord

# Reasons that depend on an engine's cache.
_BY_CACHE: Final = frozenset(
    {SingleEngineReason.CACHED, SingleEngineReason.FASTER, SingleEngineReason.SHORT}
)


def server_timing(record: RequestRecord, trouble: str = "", *, tells_cache: bool = True) -> str:
    """Return the value of the Server-Timing header; durations are milliseconds.

    ``tells_cache``: with the engines' cached parts of the prompt, and whatever depends on them.
    ``trouble``: why the decode engine does not load the prefill engine's KV, in a word; empty:
    none is known.
    """
    retries = record.retries  # few requests have any, and a comprehension is a call
    entries = [_entry("retry", str(each), each.leg.ms) for each in retries] if retries else []
    decode = record.decode
    reason = record.single_reason
    if reason is not None:
        entries.append(_entry("mode", SINGLE))
        if tells_cache or reason not in _BY_CACHE:
            entries.append(_entry("reason", reason))
    elif record.push is not None:
        entries.append(_entry("mode", record.push))
    if tells_cache:
        if record.cached is not None:
            entries.append(_entry("cached", "{} of {} bytes".format(*record.cached)))
        if decode is not None and decode.expected is not None:
            expected = decode.expected
            entries.append(_entry("expected", str(expected), expected.ttft_s * 1e3))
    if record.prefill is not None:
        entries.append(_entry("prefill", record.prefill.instance, record.prefill.ms))
    if decode is not None:
        entries.append(_entry("decode", decode.instance, decode.ms))
    if trouble:
        entries.append(_entry("kv", f"not loaded: {trouble}"))
    return ", ".join(entries)


def _entry(name: str, description: str, ms: float | None = None) -> str:
    if ms is None:
        return f'{name};desc="{description}"'
    return f'{name};desc="{description}";dur={written_ms(ms)}'
