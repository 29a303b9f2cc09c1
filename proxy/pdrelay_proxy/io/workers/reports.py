"""Asks the other workers what they have counted, and tells them what this one has; a successor inherits it."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.workers.reports import EMPTY, Counts, Part, Whole, WorkerReport, absorb, counts_of
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.metrics import processes
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.workers.context import WorkerContext

logger = logging.getLogger(__name__)
_PATIENCE_S: Final = 0.5  # seconds that a peer may take
_SAVE_S: Final = 1.0  # seconds between two looks at whether there is something to save
_MOST_BYTES: Final = 16 * 1024 * 1024
_CPU: Final = "process_cpu_seconds_total"


def report_of(
    telemetry: Telemetry,
    queue: Admission,
    part: Part = EMPTY,
    *,
    worker: int = 0,
    starts: int = 1,
    unread: int = 0,
    with_counts: bool = False,
) -> WorkerReport:
    """Write what this process has counted since it began; ``with_counts``: for another process, which has no others."""
    return WorkerReport(
        worker=worker,
        starts=starts,
        counts=counts_of(telemetry.counters) if with_counts else Counts(),
        part=part,
        legs=telemetry.in_flight,
        waiting=queue.waiting,
        admitted=queue.admitted,
        max_concurrency=queue.limits.max_concurrency,
        refused={limit.value: count for limit, count in queue.refused.items()},
        process=processes(),
        unread=unread,
    )


class WorkerReports:
    """One worker's side of it: a Unix socket on which whoever connects gets the report."""

    def __init__(self, place: WorkerContext, telemetry: Telemetry, queue: Admission, part: Callable[[], Part]) -> None:
        self._place = place
        self._telemetry = telemetry
        self._queue = queue
        self._part = part
        self._before = self._saved(place.number)  # of the worker that this one follows
        self._unread = 0 if self._before is None else self._before.unread
        self._kept = b""  # the counts, as they were saved last
        self._trouble = ""  # why they were not, as it was logged last
        if self._before is not None:
            absorb(telemetry.counters, self._before.counts)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Answer and save while the block lasts."""
        path = self._path(self._place.number, "report")
        path.unlink(missing_ok=True)  # of a worker of this number that was killed
        server = await asyncio.start_unix_server(self._answer, path)
        try:
            async with meanwhile(repeatedly(_SAVE_S, self.save, logger, "the counts could not be saved")):
                yield
        finally:
            server.close()
            await self.save()

    async def whole(self) -> Whole:
        """Ask all; one that does not answer in time counts as it was up to a second ago."""
        found = await asyncio.gather(*(self._read(peer) for peer in self._place.peers()))
        others = [report for report, _ in found if report is not None]
        serving = 1 + sum(answers for _, answers in found)
        return Whole(self._report(with_counts=False), others, serving)

    async def _read(self, peer: int) -> tuple[WorkerReport | None, bool]:
        """Return a peer's report, and whether the peer itself has given it."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._asked(peer), True
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # it has ended, and the supervisor has said so
        except (TimeoutError, OSError, msgspec.DecodeError) as exc:
            self._unread += 1
            logger.warning("worker %d does not say what it has counted (%s)", peer, str(exc) or "it takes too long")
        return self._saved(peer), False

    async def _asked(self, peer: int) -> WorkerReport:
        reader, writer = await asyncio.open_unix_connection(self._path(peer, "report"))
        try:
            data = b""
            while piece := await reader.read(1 << 18):
                data += piece
                if len(data) > _MOST_BYTES:
                    raise msgspec.DecodeError(f"it has more than {_MOST_BYTES} bytes")
            return msgspec.msgpack.decode(data, type=WorkerReport)
        finally:
            writer.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # whoever asked has gone
            writer.write(msgspec.msgpack.encode(self._report(self._part())))
            await writer.drain()
        writer.close()

    def _report(self, part: Part = EMPTY, *, with_counts: bool = True) -> WorkerReport:
        place, before = self._place, self._before
        report = report_of(
            self._telemetry,
            self._queue,
            part,
            worker=place.number,
            starts=place.starts,
            unread=self._unread,
            with_counts=with_counts,
        )
        if before is None:
            return report
        # Counters go on where those of the worker before have ended.
        refused, process = Counter(report.refused), dict(report.process)
        refused.update(before.refused)
        if _CPU in process:
            process[_CPU] += before.process.get(_CPU, 0.0)
        return msgspec.structs.replace(report, refused=refused, process=process)

    async def save(self) -> None:
        """Keep what is counted for a successor, if there is anything new."""
        counts = msgspec.msgpack.encode(counts_of(self._telemetry.counters))
        if counts == self._kept:
            return
        ended = msgspec.structs.replace(self._report(), legs={}, waiting=0, admitted=0, max_concurrency=0)
        data = msgspec.msgpack.encode(ended)
        path = self._path(self._place.number, "counts")
        new = path.with_suffix(".new")
        try:
            new.write_bytes(data)
            new.replace(path)
        except OSError as exc:  # the next look tries again
            with suppress(OSError):
                new.unlink()
            trouble = exc.strerror or str(exc)
            if trouble != self._trouble:
                logger.warning("%s cannot be written: %s", path, trouble)
            self._trouble = trouble
        else:
            self._kept = counts
            if self._trouble:
                logger.info("%s is written again", path)
            self._trouble = ""

    def _saved(self, worker: int) -> WorkerReport | None:
        path = self._path(worker, "counts")
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=WorkerReport)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as exc:
            logger.warning("%s cannot be read: %s", path, exc)
            return None

    def _path(self, worker: int, what: str) -> Path:
        return self._place.path / f"{worker}.{what}"
