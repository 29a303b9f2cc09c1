"""Sends one chat request through the router, and reads from headers and metrics how it went."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import httpx

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.served_by import LegTiming, metric_total, parse_server_timing

QUESTION = "What is the capital of France?"
TIMEOUT_S = 120.0  # vLLM's own connector was seen to take 31 s for a decode leg on two cores
METRICS_WAIT_S = 3.0  # engines publish a transfer a moment after it


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The answer, and how it was served."""

    text: str
    seconds: float  # as the client saw it
    legs: dict[str, LegTiming]  # by the name of the leg: prefill, decode
    bytes_moved: int | None  # None: no engine has a metric for it
    request_id: str | None  # that of the router; None: it did not say


def request_body(
    model: str, question: str = QUESTION, *, max_tokens: int = 24
) -> dict[str, object]:
    """Return a chat request whose answer is the same every time."""
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def send_first_request(router_url: str, mover_urls: Sequence[str], model: str) -> FirstAnswer:
    """Send the request and measure the KV that it moved. Raises LocalError in one sentence.

    ``mover_urls``: of the engines that count transfers: decode engines in pull, prefill engines in
    push.
    """
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        before = _total_bytes(client, mover_urls)
        start = time.monotonic()
        url = f"{router_url}/v1/chat/completions"
        try:
            response = client.post(url, json=request_body(model))
        except httpx.TimeoutException as exc:
            raise LocalError(f"the first request got no answer within {TIMEOUT_S:.0f} s") from exc
        except httpx.TransportError as exc:
            raise LocalError(f"the first request did not get through to {url}: {exc}") from exc
        if not response.is_success:
            status = f"status {response.status_code}: {response.text[:500]}"
            raise LocalError(f"the first request was answered with {status}")
        seconds = time.monotonic() - start
        legs = parse_server_timing(response.headers.get("server-timing", ""))
        now = before
        deadline = time.monotonic() + METRICS_WAIT_S
        while before is not None and now == before and time.monotonic() < deadline:
            time.sleep(0.1)
            now = _total_bytes(client, mover_urls) or before
    try:
        text = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise LocalError(
            f"the first request was answered with something else: {response.text[:500]}"
        )
    moved = None if now is None or before is None else now - before
    return FirstAnswer(text, seconds, legs, moved, response.headers.get("x-request-id"))


def _total_bytes(client: httpx.Client, urls: Sequence[str]) -> int | None:
    totals = list[int]()
    for url in urls:
        with suppress(httpx.TransportError):
            total = metric_total(client.get(f"{url}/metrics").content)
            totals += [] if total is None else [total]
    return sum(totals) if totals else None
