"""Opens connections, each on a thread of a pool, because every step may block for seconds."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from pdrelay_connector.core.ids import Address, ConnId, EngineId
from pdrelay_connector.core.messages import Welcome
from pdrelay_connector.core.session.handshake import HandshakeClient
from pdrelay_connector.io.connect import open_connection
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.io.tls_records import TlsRecords

Opened: TypeAlias = tuple[TlsRecords, Welcome]


class ConnectionOpener:
    """All methods belong to the owning thread.

    A pool thread calls ``wake`` when an attempt has ended.
    """

    def __init__(
        self,
        client: HandshakeClient,
        tls: Tls,
        wake: Callable[[], None],
        *,
        timeout: float,
        threads: int,
        local_only: bool,
    ) -> None:
        self._client = client
        self._tls = tls
        self._wake = wake
        self._timeout = timeout
        self._local_only = local_only
        self._pool = ThreadPoolExecutor(threads, "pdrelay-handshake")
        self._pending: set[ConnId] = set()
        self._done: queue.SimpleQueue[tuple[ConnId, Future[Opened]]] = queue.SimpleQueue()
        self._is_stopped = False

    def open(self, conn: ConnId, peer: Address, engine: EngineId) -> None:
        """Start to connect on a pool thread; :meth:`take_done` returns the outcome."""
        self._pending.add(conn)
        future = self._pool.submit(
            open_connection,
            peer,
            engine,
            self._client,
            self._tls,
            timeout=self._timeout,
            local_only=self._local_only,
        )
        future.add_done_callback(lambda done: self._report(conn, done))

    def cancel(self, conn: ConnId) -> None:
        """Stop to open a connection: it is closed as soon as it is open."""
        self._pending.discard(conn)

    def cancel_all(self) -> None:
        """Stop to open every connection."""
        self._pending.clear()

    def take_done(self) -> Sequence[tuple[ConnId, Future[Opened]]]:
        """Return the attempts that have ended, and close those that were cancelled."""
        done: list[tuple[ConnId, Future[Opened]]] = []
        while (ended := self._next_done()) is not None:
            conn, future = ended
            if conn in self._pending:
                self._pending.discard(conn)
                done.append(ended)
            elif not future.cancelled() and future.exception() is None:
                future.result()[0].close()
        return done

    def stop(self) -> None:
        """Cancel all attempts.

        One that a pool thread has begun ends by itself, within its timeout.
        """
        # before the flag: from then on a pool thread closes the connections it has opened
        self._pending.clear()
        self._is_stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.take_done()

    def _report(self, conn: ConnId, done: Future[Opened]) -> None:
        """On the pool thread: an attempt has ended."""
        self._done.put((conn, done))
        self._wake()
        if self._is_stopped:  # the owning thread no longer calls take_done()
            self.take_done()

    def _next_done(self) -> tuple[ConnId, Future[Opened]] | None:
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return None
