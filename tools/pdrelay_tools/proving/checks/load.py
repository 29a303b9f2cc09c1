"""Load: TTFT and ITL of the service, and of the single engine."""

from functools import partial
from typing import Final

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.bench import Bench, at_once, now
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.latencies import Latencies, in_ms, latencies
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import together
from pdrelay_tools.proving.services import Service

_REQUESTS: Final = 32
_AT_ONCE: Final = 8
_TOKENS: Final = 32
_LENGTHS: Final = (64, 256, 700)  # tokens of the prompts, in turn


async def load(bench: Bench) -> CheckResult:
    """Run the same load through the service and through the single engine."""
    findings: list[Finding] = []
    answers: list[list[Reply]] = []
    services = [bench.service] if bench.reference is None else [bench.service, bench.reference]
    for service in services:
        figures, failed, good = await _run(bench, service)
        bench.loads.append(figures)
        answers.append(good)
        if service is bench.service:
            bench.requests += _REQUESTS
            findings = failed
    reference_s = (
        max((reply.seconds for reply in answers[-1]), default=None) if len(answers) > 1 else None
    )
    findings += [
        finding
        for reply in answers[0]
        for finding in bench.slow("a stream of the load", reply, reference_s)
    ]
    return CheckResult(
        together(findings, _REQUESTS), [_sentence(figures) for figures in bench.loads]
    )


async def _run(bench: Bench, service: Service) -> tuple[Latencies, list[Finding], list[Reply]]:
    began = now()
    questions = [
        Question(
            Shape.IDS,
            bench.prompts.ids(min(_LENGTHS[number % len(_LENGTHS)], bench.longest)),
            stream=True,
            max_tokens=_TOKENS,
            fields={"ignore_eos": True, "stream_options": None},
            logprobs=False,
        )
        for number in range(_REQUESTS)
    ]
    ask = partial(service.ask, timeout_s=bench.limits.request_s)
    replies = await at_once(_AT_ONCE, ask, questions)
    seconds = now() - began
    good = [reply for reply in replies if not reply.failure()]
    # the last event is [DONE]
    streams = [(reply.sent_at, reply.event_times[:-1]) for reply in good]
    failed = [
        Finding(
            FindingName.NO_ANSWER if reply.is_late else FindingName.REQUEST_FAILED, reply.failure()
        )
        for reply in replies
        if reply.failure()
    ]
    return latencies(service.name, streams, failed=len(failed), seconds=seconds), failed, good


def _sentence(figures: Latencies) -> str:
    return (
        f"{figures.label}: {figures.requests} requests, {_AT_ONCE} at a time, "
        f"{figures.tokens_per_second:.0f} tokens/s; TTFT {in_ms(figures.ttft)} ms; "
        f"ITL {in_ms(figures.itl)} ms (p50 / p90 / p99)"
    )


CHECKS = (
    Check(
        "load",
        "load",
        "time to the first token and between tokens, and that of a single engine",
        load,
        40.0,
    ),
)
