"""The workers of this very engine, as its scheduler process knows them: one connection for each rank, proven."""

import hmac
from collections.abc import Mapping, Set

from xpyd_connector.core.ids import ConnId
from xpyd_connector.core.messages import Attend, Message
from xpyd_connector.core.ports import Link


class Crew:
    """Runs on the control thread."""

    def __init__(self, link: Link, tokens: Mapping[int, bytes]) -> None:
        self._link = link
        self._tokens = tokens  # rank -> what its worker proves itself with
        self._conns: dict[int, ConnId] = {}
        self._ranks: dict[ConnId, int] = {}  # the same, the other way round

    @property
    def ranks(self) -> Set[int]:
        """All ranks of this engine, whether their workers attend or not."""
        return self._tokens.keys()

    def admit(self, conn: ConnId, attend: Attend) -> bool:
        """Take in who says to be a worker, in place of who was before; false if it cannot prove it."""
        if attend.rank not in self._tokens or not hmac.compare_digest(attend.token, self._tokens[attend.rank]):
            return False
        self.leave(conn)  # a worker is of one rank, and a rank has one worker
        if (before := self._conns.get(attend.rank)) is not None:
            self.leave(before)
        self._conns[attend.rank], self._ranks[conn] = conn, attend.rank
        return True

    def leave(self, conn: ConnId) -> None:
        """Forget a connection that closed, a worker's or not."""
        if (rank := self._ranks.pop(conn, None)) is not None:
            del self._conns[rank]

    def rank_of(self, conn: ConnId) -> int | None:
        """Return which worker is behind a connection, or None."""
        return self._ranks.get(conn)

    def tell(self, rank: int, message: Message) -> None:
        """Tell a worker something; one that does not attend must be told when it comes."""
        if rank in self._conns:
            self._link.send(self._conns[rank], message)
