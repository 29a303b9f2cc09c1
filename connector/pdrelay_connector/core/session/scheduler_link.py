"""A worker's authenticated connection to its own scheduler process, reopened when it is lost."""

from pdrelay_connector.core.ids import ConnId, EngineEndpoint
from pdrelay_connector.core.messages import Message, WorkerHello
from pdrelay_connector.core.ports import (
    ConnectFailed,
    ConnectionLost,
    Link,
    LinkEvent,
    PeerConnected,
)

RETRY = 0.2  # s between attempts: our own scheduler starts to listen after us


class SchedulerLink:
    """The scheduler's orders hold until the connection is lost; over the next it repeats them."""

    def __init__(self, link: Link, scheduler_endpoint: EngineEndpoint, hello: WorkerHello) -> None:
        self._link = link
        self._scheduler = scheduler_endpoint
        self._hello = hello
        self._connect_at: float | None = 0.0  # absent while we are connected, or connecting
        self._opened: ConnId | None = None  # the connection, from when we begin to open it
        self._conn: ConnId | None = None  # the same, once it is open

    def on(self, event: LinkEvent, *, now: float) -> bool:
        """Handle an event; true if the connection was lost."""
        match event:
            case PeerConnected(conn, _):
                self._conn = conn
                self._link.send(conn, self._hello)
            case ConnectFailed():
                self._opened = None
                self._connect_at = now + RETRY
            case ConnectionLost():
                self._opened = None
                self._conn = None
                self._connect_at = now + RETRY
                return True
            case _:
                pass
        return False

    def owns(self, conn: ConnId) -> bool:
        """Whether a connection is the one to the scheduler."""
        return conn == self._opened

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open."""
        return self._conn is not None

    def send(self, message: Message) -> None:
        """Send a message to the scheduler, if it is connected."""
        if self._conn is not None:
            self._link.send(self._conn, message)

    def advance(self, *, now: float) -> float | None:
        """Connect when it is time; return when that will be, None while connected or connecting."""
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            self._opened = self._link.connect(self._scheduler.address, self._scheduler.engine)
        return self._connect_at
