"""Clients that hang up, which must leave no block held; wrong requests, which must get 4xx."""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import together
from pdrelay_tools.proving.services import EnginePairs

_LONG: Final = 200  # tokens of an answer that is not read to its end
_EARLY_S: Final = (0.0, 0.005, 0.02, 0.05, 0.1)
_MANY: Final = 2_000_000_000  # tokens that no engine has room for


async def abandoned_early(bench: Bench) -> CheckResult:
    """Hang up before the first token, at different times."""
    await asyncio.gather(
        *(bench.leave(_long(bench, 300), after_s=after_s) for after_s in _EARLY_S * 2)
    )
    findings = await bench.compare(bench.prompts.mixed(3, longest=200))
    if not isinstance(bench.service, EnginePairs):
        return CheckResult(findings)
    # A decode engine that never saw the request cannot release the prefill engine's blocks: only
    # the end of the lease does.
    return CheckResult(findings, idle_s=bench.limits.lease_s + 5)


async def abandoned_streams(bench: Bench) -> CheckResult:
    """Hang up at the first token and in the middle of a stream."""
    event_counts = (1, 1, 2, 5, 20, 20)
    wait_s = bench.limits.request_s
    replies = await asyncio.gather(
        *(
            bench.leave(_long(bench, 150), after_s=wait_s, after_events=events)
            for events in event_counts
        )
    )
    findings = [
        Finding(FindingName.NO_ANSWER, f"no first token: {reply.reason}")
        for reply in replies
        if reply.is_late
    ]
    return CheckResult(
        together(findings, len(event_counts))
        + await bench.compare(bench.prompts.mixed(3, longest=200))
    )


def _long(bench: Bench, length: int) -> Question:
    fields = {"ignore_eos": True}
    return Question(
        Shape.IDS,
        bench.prompts.ids(length),
        stream=True,
        max_tokens=_LONG,
        fields=fields,
        logprobs=False,
    )


async def refused(bench: Bench) -> CheckResult:
    """Ask for too many tokens: the decode engine refuses a request that has been prefilled."""
    questions = [Question(Shape.IDS, bench.prompts.ids(150), max_tokens=_MANY) for _ in range(4)]
    replies = await bench.ask_all(questions, most=2)
    findings = [
        finding for reply in replies for finding in _nonsense_findings("a billion tokens", reply)
    ]
    return CheckResult(
        together(findings, len(questions))
        + await bench.compare(bench.prompts.mixed(3, longest=200))
    )


async def nonsense(bench: Bench) -> CheckResult:
    """Send invalid bodies."""
    fronts = [bench.router] if bench.router is not None else bench.engines
    nonsensical = bodies(bench.facts.name, bench.facts.max_model_len or 2048)
    findings: list[Finding] = []
    for front in fronts:
        for name, body in nonsensical.items():
            bench.requests += 1
            reply = await front.post("/v1/completions", body, timeout_s=bench.limits.request_s)
            faults = _nonsense_findings(f"{front.name}, {name}", reply)
            if faults and not await _is_vllms_own(bench, reply, body):
                findings += faults
    return CheckResult(
        together(findings, len(fronts) * len(nonsensical))
        + await bench.compare(bench.prompts.mixed(3, longest=200)),
        [f"{len(fronts)} servers, {len(nonsensical)} bodies each"],
    )


async def _is_vllms_own(bench: Bench, reply: Reply, body: Mapping[str, object] | bytes) -> bool:
    """Tell whether the reference answers with the same status: then vLLM itself is at fault."""
    if reply.status is None or bench.reference is None:
        return False
    alone = await bench.reference.server.post(
        "/v1/completions", body, timeout_s=bench.limits.request_s
    )
    return alone.status == reply.status


def bodies(model: str, longest: int) -> dict[str, Mapping[str, object] | bytes]:
    """Return bodies that every server must refuse, by what is wrong with them."""
    good = {"model": model, "prompt": "a quiet river", "max_tokens": 2}
    deep = b'{"model": "x", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    return {
        "no JSON": b"{not json",
        "a list": b"[1, 2]",
        "an empty body": b"",
        "an unknown model": good | {"model": "no-such-model"},
        "a negative max_tokens": good | {"max_tokens": -1},
        "a prompt of a wrong type": good | {"prompt": {"a": 1}},
        "a temperature of a wrong type": good | {"temperature": "hot"},
        "a negative token id": good | {"prompt": [-1, 5, 6]},
        "deep nesting": deep,
        "a prompt that is too long": good | {"prompt": [25] * (longest + 1)},
        "a regular expression that ends nowhere": good | {"structured_outputs": {"regex": "(((("}},
    }


def _nonsense_findings(name: str, reply: Reply) -> list[Finding]:
    if reply.is_late:
        return [Finding(FindingName.NO_ANSWER, f"{name}: {reply.reason}")]
    if reply.status == 200 and not reply.reason:
        return [Finding(FindingName.BAD_INPUT_ACCEPTED, f"{name}: HTTP 200")]
    if reply.status is None or not 400 <= reply.status < 500:
        return [Finding(FindingName.BAD_INPUT_ERROR, f"{name}: {reply.failure()}")]
    if not _has_message(reply.body):
        shown = reply.body[:100].decode(errors="replace")
        return [
            Finding(
                FindingName.BAD_INPUT_ERROR,
                f"{name}: HTTP {reply.status} without a message: {shown}",
            )
        ]
    return []


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    """An error, in OpenAI's shape or in vLLM's earlier one."""

    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)
    message: str = ""


def _has_message(body: bytes) -> bool:
    try:
        answer = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(answer.error.message or answer.message)


CHECKS = (
    Check(
        "abandoned-early",
        "clients",
        "clients that hang up before the first token",
        abandoned_early,
        20.0,
    ),
    Check(
        "abandoned-streams",
        "clients",
        "clients that hang up in the middle of a stream",
        abandoned_streams,
        20.0,
    ),
    Check(
        "refused",
        "clients",
        "requests that the decode engine refuses after the prefill",
        refused,
        15.0,
    ),
    Check("nonsense", "clients", "bodies that make no sense", nonsense, 15.0),
)
