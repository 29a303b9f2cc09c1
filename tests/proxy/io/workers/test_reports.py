"""Numbers of all workers, from whoever is asked."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.limits import Limit
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.io.metrics import Metrics
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.status import Status
from pdrelay_proxy.io.workers.context import WorkerContext
from pdrelay_proxy.io.workers.reports import WorkerReports
from pdrelay_proxy.settings import Settings
from support.small_disk import HOW, WORDS, small_disk

pytestmark = pytest.mark.processes


class Worker:
    """One of two."""

    def __init__(self, folder, number, starts=1):
        self.telemetry = Telemetry(Counters(frozenset()), lambda: 1.0)
        self.queue = Admission(Settings(max_concurrency=1, max_queue=0))
        self.status = Status(self.telemetry, Registry(), lambda: 1.0)
        self.metrics = Metrics(self.telemetry, Registry())
        place = WorkerContext(number, 2, str(folder), port=0, line=0, starts=starts)
        self.reports = WorkerReports(place, self.telemetry, self.queue, self.status.part)

    def serves(self, times):
        for _ in range(times):
            self.telemetry.counters.requests["/v1/completions", "ok"] += 1

    def refuses(self, times):
        for _ in range(times + 1):
            self.queue.arrive("k", 0, 1, now=0.0)

    async def lines(self):
        body, _ = self.metrics.exposition("", await self.reports.whole())
        return dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))


SERVED = 'pdrelay_requests_total{outcome="ok",path="/v1/completions"}'
REFUSED = f'pdrelay_requests_refused_total{{reason="{Limit.QUEUE}"}}'


async def test_a_successor_goes_on_counting_where_the_one_before_ended(tmp_path):
    """A counter that falls would be taken for one that has begun anew; and meanwhile the last numbers stand."""
    zero, one = Worker(tmp_path, 0), Worker(tmp_path, 1)
    zero.serves(1)
    async with zero.reports.running():
        async with one.reports.running():
            one.serves(5)
            one.refuses(3)
            cpu = (await zero.lines())["process_cpu_seconds_total"]
        between = await zero.lines()
        new = Worker(tmp_path, 1, starts=2)
        new.serves(1)
        new.refuses(1)
        async with new.reports.running():
            after = await zero.lines()

    assert (between[SERVED], between[REFUSED], between["pdrelay_workers"]) == ("6.0", "3.0", "1.0")
    assert (after[SERVED], after[REFUSED], after["pdrelay_workers"]) == ("7.0", "4.0", "2.0")
    assert after['pdrelay_worker_starts_total{worker="1"}'] == "2.0"
    assert float(after["process_cpu_seconds_total"]) >= float(cpu)


@pytest.mark.parametrize("how", HOW)
async def test_counts_that_cannot_be_saved_are_said_once_and_saved_later(tmp_path, how, caplog):
    """A line each second would fill what room there is; a worker that dies later is succeeded without a loss."""
    caplog.set_level("INFO")
    with small_disk(tmp_path) as disk:
        one = Worker(disk.path, 1)
        one.serves(1)
        await one.reports.save()
        disk.fail(how)
        for _ in range(3):
            one.serves(1)
            await one.reports.save()
        disk.mend(how)
        await one.reports.save()  # nothing is new, and what is not saved is saved

        assert (await Worker(disk.path, 1, starts=2).lines())[SERVED] == "4.0"
        said = f"{disk.path}/1.counts cannot be written: {WORDS[how]}"
        assert caplog.messages == [said, f"{disk.path}/1.counts is written again"]


@pytest.mark.parametrize("how", ["is silent", "talks nonsense"])
async def test_a_worker_that_does_not_answer_costs_half_a_second_and_is_counted(tmp_path, how, caplog):
    """A scrape has a timeout of its own, and an operator should know that a number is old."""
    zero = Worker(tmp_path, 0)
    zero.serves(2)

    async def hang(reader, writer):
        if how == "talks nonsense":
            writer.write(b"what?")
        else:
            await reader.read()  # until whoever asked has gone
        writer.close()
        await writer.wait_closed()

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(zero.reports.running())
        server = await asyncio.start_unix_server(hang, tmp_path / "1.report")
        stack.callback(server.close)
        async with asyncio.timeout(20.0):
            lines = await zero.lines()
        await asyncio.sleep(0)

    assert (lines[SERVED], lines["pdrelay_workers"], lines["pdrelay_worker_scrape_failures_total"]) == (
        "2.0",
        "1.0",
        "1.0",
    )
    assert "worker 1 does not say what it has counted" in caplog.text
