"""The tier of each test: what it may touch. One that touches more fails, as does one that takes too much CPU time.

A module says its tier with a marker; without one it is of the lowest. CPU time, with that of all children that have
ended, is much the same on a busy machine, which the time of day is not. The summary has the sums by tier and the
dearest files.
"""

import os
import sys
from collections import Counter
from enum import IntEnum

import pytest

from support import nursery

MOST_FILES = 15  # in the summary
_PROPERTY = "tier_and_cpu"
# CPU seconds that a test may take, by tier: several times what most take. One that needs more is marked slow, or leaves
# fewer of its cases to make test. Engines serve many tests: what they use is no test's own.
_MOST_CPU_S = (10.0, 15.0, 30.0, float("inf"))
_SOCKETS = frozenset({"socket.bind", "socket.connect"})
_PROCESSES = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", nursery.BORN})


class Tier(IntEnum):
    """What a test may touch; each may do what those before it do."""

    RULES = 0  # Python alone: simulated time, engines and links in memory
    EDGES = 1  # sockets of this process
    PROCESSES = 2
    ENGINES = 3  # vLLM's, or NIXL's


class _Touched:
    """The highest tier of which something was touched since the last test began, and what that was."""

    def __init__(self) -> None:
        self.tier = Tier.RULES
        self.what = ""
        self.shared_cpu_s = 0.0  # of fixtures that all modules share
        self._means = dict.fromkeys(_SOCKETS, Tier.EDGES) | dict.fromkeys(_PROCESSES, Tier.PROCESSES)

    def notice(self, event: str, _: tuple[object, ...]) -> None:
        """Implements an audit hook, which cannot be taken away again: it is called when modules are gone, too."""
        tier = self._means.get(event, 0)
        if tier > self.tier:
            self.tier = tier
            self.what = event


_touched = _Touched()
sys.addaudithook(_touched.notice)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Begin with a test that has touched nothing."""
    _touched.tier = Tier.RULES
    _touched.shared_cpu_s = 0.0
    item.cpu_before = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """What all modules share is touched by no test: any of them may be the first that wants it."""
    before = _touched.tier, _touched.what
    cpu_before = _cpu_seconds()
    found = yield
    if fixturedef.scope == "session":
        _touched.tier, _touched.what = before
        _touched.shared_cpu_s += _cpu_seconds() - cpu_before
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note with the end of a test what it has cost; a module's fixtures count for the first test that wants them."""
    report = yield
    if report.when == "teardown":
        declared = _declared_tier(item)
        cpu_s = _cpu_seconds() - item.cpu_before - _touched.shared_cpu_s
        tier = declared if declared is Tier.ENGINES else _touched.tier
        item.user_properties.append((_PROPERTY, (int(tier), round(cpu_s, 3))))
        report.user_properties = item.user_properties  # with pytest-xdist the summary is in another process
        fault = _fault(item, declared, cpu_s)
        if fault and report.passed:
            report.outcome = "failed"
            report.longrepr = fault
    return report


def _declared_tier(item):
    if item.get_closest_marker("vllm") or item.get_closest_marker("nixl"):
        return Tier.ENGINES
    allowed = [tier for tier in (Tier.EDGES, Tier.PROCESSES) if item.get_closest_marker(tier.name.lower())]
    return max(allowed, default=Tier.RULES)


def _fault(item, declared, cpu_s):
    if _touched.tier > declared:
        marker = f"pytestmark = pytest.mark.{Tier(_touched.tier).name.lower()}"
        return f"{item.nodeid} does {_touched.what}, and its tier is {declared.name.lower()}: {marker} allows it"
    most = _MOST_CPU_S[declared]
    if cpu_s > most and not any(item.get_closest_marker(name) for name in ("slow", "thorough", "compiled")):
        return f"{item.nodeid} took {cpu_s:.1f} s of CPU, and one of its tier has {most:g}: mark it slow, and say why"
    return None


def pytest_terminal_summary(terminalreporter):
    """Say what each tier has cost, and which files most of it."""
    tiers = Counter()
    files = Counter()
    counts = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":
                continue
            found = dict(report.user_properties).get(_PROPERTY)
            if found is not None:
                tier, seconds = found
                tiers[tier] += seconds
                counts[tier] += 1
                files[report.nodeid.partition("::")[0]] += seconds
    if not tiers:
        return
    terminalreporter.section("CPU time")
    for tier in Tier:
        if counts[tier]:
            terminalreporter.write_line(
                f"{tiers[tier]:8.1f} s  {counts[tier]:6} tests  tier {tier}, {tier.name.lower()}"
            )
    for file, seconds in files.most_common(MOST_FILES):
        terminalreporter.write_line(f"{seconds:8.1f} s  {file}")


def _cpu_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + nursery.cpu_seconds()
