"""A scheduler's connections to its engine's workers: one for each rank, authenticated by token."""

import hmac
from collections.abc import Mapping, Set

from pdrelay_connector.core.ids import ConnId
from pdrelay_connector.core.messages import Message, WorkerHello
from pdrelay_connector.core.ports import Link


class WorkerLinks:
    """Runs on the control thread."""

    def __init__(self, link: Link, tokens: Mapping[int, bytes]) -> None:
        self._link = link
        self._tokens = tokens  # rank -> its worker's token
        self._conns: dict[int, ConnId] = {}
        self._ranks: dict[ConnId, int] = {}  # the same, the other way round

    @property
    def ranks(self) -> Set[int]:
        """All ranks of this engine, whether their workers are connected or not."""
        return self._tokens.keys()

    def is_worker(self, hello: WorkerHello) -> bool:
        """Whether a hello is of one of our workers: it has the token of its rank."""
        token = self._tokens.get(hello.rank)
        return token is not None and hmac.compare_digest(hello.token, token)

    def add(self, conn: ConnId, hello: WorkerHello) -> bool:
        """Accept a worker's connection in place of an earlier one; false if its token is wrong."""
        if not self.is_worker(hello):
            return False
        self.remove(conn)  # a worker is of one rank, and a rank has one worker
        if (before := self._conns.get(hello.rank)) is not None:
            self.remove(before)
        self._conns[hello.rank] = conn
        self._ranks[conn] = hello.rank
        return True

    def remove(self, conn: ConnId) -> None:
        """Forget a connection that closed, a worker's or not."""
        if (rank := self._ranks.pop(conn, None)) is not None:
            del self._conns[rank]

    def rank_of(self, conn: ConnId) -> int | None:
        """Return which worker is behind a connection, or None."""
        return self._ranks.get(conn)

    def send_all(self, message: Message) -> None:
        """Send a message to all workers that are connected."""
        for rank in self.ranks:
            self.send(rank, message)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a worker if it is connected; if not, the caller sends it later."""
        if rank in self._conns:
            self._link.send(self._conns[rank], message)
