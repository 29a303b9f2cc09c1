"""What an engine has done so far and has to do, as its own metrics say: so it counts whoever has
sent the requests.
"""

import re
from dataclasses import dataclass
from math import fsum
from typing import Final

from pdrelay_proxy.core.model import InstanceId, Role

# Of vllm/v1/metrics/loggers.py.
_RUNNING: Final = b"\nvllm:num_requests_running"
_WAITING: Final = b"\nvllm:num_requests_waiting"
_KV: Final = b"\nvllm:kv_cache_usage_perc"
_PROMPT: Final = b"\nvllm:prompt_tokens_total"
_PROMPTS: Final = b"\nvllm:request_prompt_tokens_count"
_PREFILL_SUM: Final = b"\nvllm:request_prefill_time_seconds_sum"
_STEPS: Final = b"\nvllm:iteration_tokens_total_count"
_ITL_SUM: Final = b"\nvllm:inter_token_latency_seconds_sum"
_ITL_COUNT: Final = b"\nvllm:inter_token_latency_seconds_count"
_SOURCES: Final = b"\nvllm:prompt_tokens_by_source_total"
_COMPUTED: Final = b'source="local_compute"'
_LINE: Final = re.compile(rb"vllm:[a-z_]{1,40}(?:\{(?P<labels>[^\n]*)\})? (?P<value>[^\n]*)")
_ENGINE: Final = re.compile(rb'(?:^|,)engine="([0-9]{1,6})"')
_MOST_REQUESTS: Final = 1e9
# tokens, steps or seconds since the start of an engine: a thousand engines take years for less
_MOST: Final = 1e15
_LEAST: Final = 1e-9  # less is nothing


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """One look at an engine. Totals are since its start."""

    at: float  # seconds of a clock that only rises
    running: float  # requests
    waiting: float  # requests
    kv_usage: float | None  # share of its KV cache in use; None: it does not say
    computed_tokens: float  # of prompts, that it has computed itself
    prompts: float  # requests that are over
    itl_sum_s: float  # seconds between two tokens of an answer, of all answers
    itl_count: float  # how many those were
    # from the first step of a request to its first token, of all; None: not shown
    prefill_s: float | None = None
    steps: float | None = None  # of the engine, that made a token; None: not shown


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One engine that serves, as it is now."""

    name: InstanceId
    role: Role
    key: str  # what all routers call it; the one that comes first turns first
    totals: EngineTotals | None  # None: it did not answer
    may_turn: bool = True


def engine_totals(text: bytes, rank: int | None = None, *, now: float) -> EngineTotals | None:
    """Read an engine's metrics, or those of one of its data-parallel ranks.

    None: they are not vLLM's, or one of them is absurd, as NaN or a negative count: the others are
    not to be believed, and what would follow from it is decided for all engines.
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
    """Read the values of a metric; ``label``: of those lines that have it. Raises _AbsurdNumber."""
    found = list[float]()
    at = text.find(name)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        line = _LINE.fullmatch(text[at + 1 : end if end >= 0 else len(text)])
        is_whole = text[at + len(name) : at + len(name) + 1] in (b"{", b" ")  # others begin alike
        if is_whole and line is not None:
            labels = line["labels"] or b""
            engine = _ENGINE.search(labels)
            if label in labels and (rank is None or engine is None or int(engine[1]) == rank):
                found.append(_sound(line["value"], most))
        at = text.find(name, at + 1)
    return found


def _sound(value: bytes, most: float) -> float:
    try:
        number = float(value)
    except ValueError as exc:
        raise _AbsurdNumber from exc
    if not 0.0 <= number <= most:  # as NaN is neither
        raise _AbsurdNumber
    return number if number >= _LEAST else 0.0
