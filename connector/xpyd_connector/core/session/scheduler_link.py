"""A worker's connection to its own scheduler process: opened, proven, and opened again when it is lost."""

from xpyd_connector.core.ids import ConnId, EngineAt
from xpyd_connector.core.messages import Attend, Message
from xpyd_connector.core.ports import Failed, Link, LinkEvent, Lost, Met

RETRY = 0.2  # s before our own scheduler, which starts to listen after us, is called again


class Home:
    """Whatever the worker was told stands until the connection is lost; when it is back, it is told again."""

    def __init__(self, link: Link, home: EngineAt, attend: Attend) -> None:
        self._link = link
        self._home = home
        self._attend = attend
        self._call_at: float | None = 0.0  # absent while we are connected, or connecting
        self._conn: ConnId | None = None

    def on(self, event: LinkEvent, *, now: float) -> bool:
        """Take in what happened to the connection; true if it was lost, and with it who we work for."""
        match event:
            case Met(conn, _):
                self._conn = conn
                self._link.send(conn, self._attend)
            case Failed():
                self._call_at = now + RETRY
            case Lost():
                self._conn, self._call_at = None, now + RETRY
                return True
            case _:
                pass
        return False

    @property
    def is_there(self) -> bool:
        """Whether the connection is open."""
        return self._conn is not None

    def say(self, message: Message) -> None:
        """Tell the scheduler something; nobody, while it is away."""
        if self._conn is not None:
            self._link.send(self._conn, message)

    def advance(self, *, now: float) -> float | None:
        """Call when it is time; return when it will be, None while there is no need."""
        if self._call_at is not None and now >= self._call_at:
            self._call_at = None
            self._link.meet(self._home.address, self._home.engine)
        return self._call_at
