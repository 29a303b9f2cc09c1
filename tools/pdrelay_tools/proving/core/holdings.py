"""What an engine holds, by its metrics: vLLM's KV usage and queues, and pdrelay's tables."""

import re
from dataclasses import dataclass
from math import isfinite
from typing import Final

_LINE: Final = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}\n]*)\})? (\S+)", re.MULTILINE)
# \b: without it the search begins at each letter of a long word
_LABEL: Final = re.compile(r'\b(\w+)="([^"]*)"')
_USAGE: Final = "vllm:kv_cache_usage_perc"
_QUEUES: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_TABLES: Final = (
    "vllm:pdrelay_leases_held",
    "vllm:pdrelay_blocks_held",
    "vllm:pdrelay_requests_waiting_for_remote_kv",
    "vllm:pdrelay_blocks_quarantined",
)
_WATCHED: Final = {_USAGE, *_QUEUES, *_TABLES}
_BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
_NOTHING: Final = 1e-6  # of a cache's usage


@dataclass(frozen=True, slots=True)
class Holdings:
    """What an engine holds at a moment."""

    usage: float  # share of the KV cache, 0 to 1
    requests: float  # running and waiting
    tables: tuple[tuple[str, float], ...]  # pdrelay's tables that are not empty
    # tokens of prompts that came from another engine; None: it does not count them
    loaded: float | None
    block_size: int | None  # tokens
    blocks: int | None  # of the whole cache

    def beyond(self, usual: "Holdings | None") -> str:
        """Describe what is held beyond the usual; empty: nothing."""
        excess: list[str] = []
        share = self.usage - (usual.usage if usual else 0.0)
        usual_tables = dict(usual.tables) if usual else {}
        if share > _NOTHING:
            blocks = f" ({round(share * self.blocks)} blocks)" if self.blocks else ""
            excess.append(f"{share:.2%} of its KV cache{blocks}")
        excess += [
            f"{value:g} {name.removeprefix('vllm:pdrelay_').replace('_', ' ')}"
            for name, value in self.tables
            if value > usual_tables.get(name, 0.0)
        ]
        if (requests := self.requests - (usual.requests if usual else 0.0)) > 0:
            excess.append(f"{requests:g} running or waiting requests")
        return ", ".join(excess)


def read_holdings(exposition: str) -> Holdings | None:
    """Read an engine's metrics, all ranks together; None: not vLLM's, or a NaN among them."""
    totals: dict[str, float] = {}
    block_size = blocks = None
    usage: list[float] = []
    for name, labels, number in _LINE.findall(exposition):
        label_values = dict(_LABEL.findall(labels))
        if name == "vllm:cache_config_info":
            block_size = _count(label_values.get("block_size", "")) or block_size
            blocks = _count(label_values.get("num_gpu_blocks", "")) or blocks
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        if not isfinite(value):
            if name in _WATCHED:
                return None  # every comparison with NaN is false: it would pass for idle
            continue
        if name == _USAGE:
            usage.append(value)
        if name != _BY_SOURCE or label_values.get("source") == "external_kv_transfer":
            totals[name] = totals.get(name, 0.0) + value
    if not usage:
        return None
    tables = tuple((name, totals[name]) for name in _TABLES if totals.get(name, 0.0) > 0)
    return Holdings(
        usage=max(usage),
        requests=sum(totals.get(name, 0.0) for name in _QUEUES),
        tables=tables,
        loaded=totals.get(_BY_SOURCE),
        block_size=block_size,
        blocks=blocks,
    )


def _count(text: str) -> int | None:
    return (
        int(text)
        if text.isascii() and text.isdigit() and len(text) < 12 and int(text) > 0
        else None
    )
