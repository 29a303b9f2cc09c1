"""What each test touches, which is its tier, and the CPU time it takes, with that of all children that have ended.

The summary has the sums by tier and the dearest files. CPU time is the same on a busy machine, the time of day is not.
"""

import os
import sys
from collections import Counter
from enum import IntEnum

import pytest

from support import nursery

MOST_FILES = 15  # in the summary
_PROPERTY = "tier_and_cpu"
_SOCKETS = frozenset({"socket.bind", "socket.connect"})
_PROCESSES = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", nursery.BORN})


class Tier(IntEnum):
    """What a test may touch; each may do what those before it do."""

    RULES = 0  # Python alone: simulated time, engines and links in memory
    EDGES = 1  # sockets of this process
    PROCESSES = 2
    ENGINES = 3  # vLLM's, or NIXL's


class _Touched:
    """The highest tier of which something was touched since the last test began."""

    def __init__(self) -> None:
        self.tier = Tier.RULES

    def notice(self, event: str, _: tuple[object, ...]) -> None:
        """Implements an audit hook, which cannot be taken away again."""
        if event in _PROCESSES:
            self.tier = max(self.tier, Tier.PROCESSES)
        elif event in _SOCKETS:
            self.tier = max(self.tier, Tier.EDGES)


_touched = _Touched()
sys.addaudithook(_touched.notice)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Begin with a test that has touched nothing."""
    _touched.tier = Tier.RULES
    item.cpu_before = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note with the end of a test what it has cost; fixtures count for the first test that wants them."""
    report = yield
    if report.when == "teardown":
        tier = Tier.ENGINES if _uses_engines(item) else _touched.tier
        item.user_properties.append((_PROPERTY, (int(tier), round(_cpu_seconds() - item.cpu_before, 3))))
        report.user_properties = item.user_properties  # with pytest-xdist the summary is in another process
    return report


def pytest_terminal_summary(terminalreporter):
    """Say what each tier has cost, and which files most of it."""
    tiers, files, counts = Counter(), Counter(), Counter()
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


def _uses_engines(item):
    return item.get_closest_marker("vllm") is not None or item.get_closest_marker("nixl") is not None


def _cpu_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + nursery.cpu_seconds()
