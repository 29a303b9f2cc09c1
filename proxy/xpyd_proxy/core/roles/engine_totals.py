"""What an engine has done so far and has to do, as its own metrics say: so it counts whoever has sent the requests."""

import re
from dataclasses import dataclass
from math import fsum
from typing import Final

from xpyd_proxy.core.fleet.engine_metrics import gauge_values, whole_lines
from xpyd_proxy.core.model import InstanceId, Role

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
_COMPUTED: Final = re.compile(
    rb"vllm:prompt_tokens_by_source_total\{"
    rb'(?P<labels>[^\n]{0,2000}source="local_compute"[^\n]{0,2000})\} (?P<value>[0-9]{1,18}(?:\.[0-9]{1,18})?'
    rb"(?:[eE][+-]?[0-9]{1,2})?)$",
    re.MULTILINE,
)
_ENGINE: Final = re.compile(rb'(?:^|,)engine="([0-9]{1,6})"')


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
    prefill_s: float | None = None  # from the first step of a request to its first token, of all; None: not shown
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
    """Read an engine's metrics, or those of one of its data-parallel ranks; None: they are not vLLM's."""
    running, waiting = gauge_values(text, _RUNNING, rank), gauge_values(text, _WAITING, rank)
    if not running:
        return None
    usage, computed = gauge_values(text, _KV, rank), _computed(text, rank)
    prefill, steps = gauge_values(text, _PREFILL_SUM, rank), gauge_values(text, _STEPS, rank)
    return EngineTotals(
        at=now,
        running=fsum(running),
        waiting=fsum(waiting),
        kv_usage=min(1.0, max(0.0, max(usage))) if usage else None,
        computed_tokens=fsum(computed or gauge_values(text, _PROMPT, rank)),
        prompts=fsum(gauge_values(text, _PROMPTS, rank)),
        itl_sum_s=fsum(gauge_values(text, _ITL_SUM, rank)),
        itl_count=fsum(gauge_values(text, _ITL_COUNT, rank)),
        prefill_s=fsum(prefill) if prefill else None,
        steps=fsum(steps) if steps else None,
    )


def _computed(text: bytes, rank: int | None) -> list[float]:
    found = list[float]()
    for line in whole_lines(text, _COMPUTED):
        engine = _ENGINE.search(line["labels"])
        if rank is None or engine is None or int(engine[1]) == rank:
            found.append(float(line["value"]))
    return found
