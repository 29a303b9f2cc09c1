"""The list of all checks, and the loop that runs them within the time limit."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdrelay_tools.proving.bench import Bench, CheckAborted, CheckSkipped, now
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.checks import clients, equality, faults, features, handovers, load, many
from pdrelay_tools.proving.core.finding import CheckReport, CheckState, Finding, FindingName
from pdrelay_tools.proving.idleness import wait_idle
from pdrelay_tools.proving.peers import DeedFailed
from pdrelay_tools.proving.services import EnginePairs

ALL_CHECKS: Final[tuple[Check, ...]] = (
    *equality.CHECKS,
    *many.CHECKS,
    *clients.CHECKS,
    *features.CHECKS,
    *load.CHECKS,
    *faults.CHECKS,
    *handovers.CHECKS,  # the last: engines were seen to die of them
)
_HEALTH_S: Final = 10.0
_SAMPLED_EVERY_S: Final = 2.0
_SAMPLES: Final = 2_000  # of an engine


@dataclass
class UsageSamples:
    """How much of each engine's KV cache was in use, over the run."""

    began: float
    by_engine: dict[str, list[tuple[float, float]]] = field(
        default_factory=dict[str, list[tuple[float, float]]]
    )

    async def sample_engines(self, bench: Bench) -> None:
        """Sample all engines every few seconds, until cancelled."""
        while True:
            for server in bench.engines:
                samples = self.by_engine.setdefault(server.name, [])
                if (
                    len(samples) < _SAMPLES
                    and (holdings := await bench.holdings(server)) is not None
                ):
                    samples.append((now() - self.began, holdings.usage))
            await asyncio.sleep(_SAMPLED_EVERY_S)


def chosen(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Return the checks that names of checks or groups select; raises KeyError: unknown name."""
    names = {check.name for check in ALL_CHECKS} | {check.group for check in ALL_CHECKS}
    for name in (*only, *skip):
        if name not in names:
            raise KeyError(name)
    return [
        check
        for check in ALL_CHECKS
        if (not only or {check.name, check.group} & set(only))
        and not {check.name, check.group} & set(skip)
    ]


async def run_checks(
    bench: Bench,
    checks: Sequence[Check],
    samples: UsageSamples,
    notify: Callable[[int, Check, CheckReport | None], None],
) -> list[CheckReport]:
    """Run checks one after the other; ``notify`` gets each at its start (None) and at its end."""
    sampling = asyncio.create_task(samples.sample_engines(bench))
    reports: list[CheckReport] = []
    try:
        for number, check in enumerate(checks, start=1):
            notify(number, check, None)
            report = await _run_check(bench, check, samples.began)
            reports.append(report)
            notify(number, check, report)
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
    return reports


async def _run_check(bench: Bench, check: Check, began: float) -> CheckReport:
    start = now()
    began_s = start - began
    if skipped := _missing(bench, check) or _no_time(bench, check, began_s):
        return CheckReport(
            check.name,
            check.group,
            check.about,
            CheckState.SKIPPED,
            began_s=began_s,
            seconds=0.0,
            requests=0,
            reason=skipped,
        )
    before = bench.requests
    left_s = max(check.seconds, bench.limits.seconds - began_s)
    state, reason, result = await _outcome(bench, check, left_s + bench.limits.request_s)
    ended = now()
    dead = await _dead(bench)
    if dead:
        bench.down = f"{next(iter(dead))} is down since the check {check.name}"
    bound_s = bench.limits.idle_s if result.idle_s is None else result.idle_s
    idle = await wait_idle(bench, ended, began=start, bound_s=bound_s, dead=dead)
    findings = (
        *result.findings,
        *(Finding(FindingName.ENGINE_DOWN, f"{name}: {why}") for name, why in dead.items()),
        *idle.findings,
    )
    return CheckReport(
        name=check.name,
        group=check.group,
        about=check.about,
        state=CheckState.FAILED if findings else state,
        began_s=began_s,
        seconds=now() - start,
        requests=bench.requests - before,
        findings=findings,
        notes=tuple(result.notes),
        reason=reason,
        idle_s=idle.seconds,
    )


async def _outcome(
    bench: Bench, check: Check, most_s: float
) -> tuple[CheckState, str, CheckResult]:
    """Run a check; return how it ended, why if it did not pass, and its result."""
    requests = bench.requests
    uncompared = bench.uncompared
    try:
        async with asyncio.timeout(most_s):
            result = await check.run(bench)
    except CheckSkipped as exc:
        return CheckState.SKIPPED, str(exc), CheckResult()
    except (CheckAborted, DeedFailed) as exc:
        return CheckState.ABORTED, str(exc), CheckResult()
    except TimeoutError:
        return CheckState.ABORTED, f"it took more than {most_s:.0f} s", CheckResult()
    if missed := bench.uncompared - uncompared:
        reason = (
            f"{missed} of {bench.requests - requests} answers were compared with nothing, as the "
            f"reference did not answer: {bench.unanswered}"
        )
        return CheckState.ABORTED, reason, result
    return CheckState.PASSED, "", result


def _missing(bench: Bench, check: Check) -> str:
    """Return which need of a check is missing; empty: none."""
    if bench.down:
        return bench.down
    if check.is_direct and not isinstance(bench.service, EnginePairs):
        return "it needs the engines themselves (--prefill and --decode without --router)"
    if check.needs_reference and bench.reference is None:
        return "it needs a single engine to compare with (--reference)"
    for role, deed in check.deeds:
        if not bench.peers.can(role, deed):
            return f"nothing says how to {deed} the first {role} engine (--{deed}-{role})"
    return ""


def _no_time(bench: Bench, check: Check, spent_s: float) -> str:
    left_s = bench.limits.seconds - spent_s
    return (
        f"it takes about {check.seconds:.0f} s, and {max(0.0, left_s):.0f} s are left (--seconds)"
        if left_s < check.seconds
        else ""
    )


async def _dead(bench: Bench) -> dict[str, str]:
    """Return the servers that do not answer their health check, and why."""
    servers = [*bench.engines, *([bench.router] if bench.router is not None else [])]
    replies = await asyncio.gather(
        *(server.get("/health", timeout_s=_HEALTH_S) for server in servers)
    )
    return {
        server.name: reply.failure()
        for server, reply in zip(servers, replies, strict=True)
        if reply.failure()
    }
