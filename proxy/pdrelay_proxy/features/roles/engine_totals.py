"""Reads an engine's work from its own metrics, which include the requests of all routers."""

import re
from dataclasses import dataclass
from math import fsum
from typing import Final

from pdrelay_proxy.core.fleet.engine_metrics import is_of_rank, metric_lines
from pdrelay_proxy.core.model import InstanceId, Role

# The names are those of vllm/v1/metrics/loggers.py.
_RUNNING: Final = b"vllm:num_requests_running"
_WAITING: Final = b"vllm:num_requests_waiting"
_KV: Final = b"vllm:kv_cache_usage_perc"
_PROMPT: Final = b"vllm:prompt_tokens_total"
_PROMPTS: Final = b"vllm:request_prompt_tokens_count"
_PREFILL_SUM: Final = b"vllm:request_prefill_time_seconds_sum"
_STEPS: Final = b"vllm:iteration_tokens_total_count"
_ITL_SUM: Final = b"vllm:inter_token_latency_seconds_sum"
_ITL_COUNT: Final = b"vllm:inter_token_latency_seconds_count"
_SOURCES: Final = b"vllm:prompt_tokens_by_source_total"
_COMPUTED: Final = b'source="local_compute"'
_LINE: Final = re.compile(rb"vllm:[a-z_]{1,40}(?:\{(?P<labels>[^\n]*)\})? (?P<value>[^\n]*)")
_MOST_REQUESTS: Final = 1e9
# tokens, steps or seconds since the start of an engine: no engine reaches it in years
_MOST: Final = 1e15
_LEAST: Final = 1e-9  # less counts as zero


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """One sample of an engine's metrics. Totals are since its start."""

    at: float  # seconds of a clock that only rises
    running: float  # requests
    waiting: float  # requests
    kv_usage: float | None  # share of its KV cache in use; None: it does not say
    computed_tokens: float  # of prompts, computed here
    prompts: float  # requests that are over
    itl_sum_s: float  # sum of the seconds between two tokens, over all answers
    itl_count: float  # the number of these intervals
    # sum of the seconds from a request's first step to its first token; None: no metric
    prefill_s: float | None = None
    steps: float | None = None  # that made a token; None: no metric


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The latest sample of one serving engine."""

    name: InstanceId
    role: Role
    key: str  # its name at all routers; the engine with the first key changes first
    totals: EngineTotals | None  # None: it did not answer
    may_turn: bool = True


def engine_totals(text: bytes, rank: int | None = None, *, now: float) -> EngineTotals | None:
    """Parse an engine's metrics, or those of one of its data-parallel ranks.

    None: not vLLM's, or one of them is absurd, such as NaN or a negative count. Then the others are
    not trusted either, because they would decide about the whole fleet.
    """
    try:
        return _totals(text, rank, now)
    except _AbsurdNumber:
        return None


class _AbsurdNumber(Exception): ...


def _totals(text: bytes, rank: int | None, now: float) -> EngineTotals | None:
    running, waiting = (
        _values(text, name, rank, most=_MOST_REQUESTS) for name in (_RUNNING, _WAITING)
    )
    usage = _values(text, _KV, rank)
    computed = _values(text, _SOURCES, rank, label=_COMPUTED)
    prefill = _values(text, _PREFILL_SUM, rank)
    steps = _values(text, _STEPS, rank)
    prompts = _values(text, _PROMPTS, rank)
    prompt_tokens = _values(text, _PROMPT, rank)
    itl_sum = _values(text, _ITL_SUM, rank)
    itl_count = _values(text, _ITL_COUNT, rank)
    if not running:
        return None
    return EngineTotals(
        at=now,
        running=fsum(running),
        waiting=fsum(waiting),
        kv_usage=min(1.0, max(usage)) if usage else None,
        computed_tokens=fsum(computed or prompt_tokens),
        prompts=fsum(prompts),
        itl_sum_s=fsum(itl_sum),
        itl_count=fsum(itl_count),
        prefill_s=fsum(prefill) if prefill else None,
        steps=fsum(steps) if steps else None,
    )


def _values(
    text: bytes, name: bytes, rank: int | None, *, label: bytes = b"", most: float = _MOST
) -> list[float]:
    """Return the values of a metric, of lines with ``label`` if given. Raises _AbsurdNumber."""
    values = list[float]()
    for found in metric_lines(text, name, _LINE):
        if label in (found["labels"] or b"") and is_of_rank(found, rank):
            values.append(_sound(found["value"], most))
    return values


def _sound(value: bytes, most: float) -> float:
    try:
        number = float(value)
    except ValueError as exc:
        raise _AbsurdNumber from exc
    if not 0.0 <= number <= most:  # also true of NaN
        raise _AbsurdNumber
    return number if number >= _LEAST else 0.0
