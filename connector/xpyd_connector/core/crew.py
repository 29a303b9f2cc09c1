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

    @property
    def ranks(self) -> Set[int]:
        """All ranks of this engine, whether their workers attend or not."""
        return self._tokens.keys()

    def admit(self, conn: ConnId, attend: Attend) -> bool:
        """Take in who says to be a worker, in place of who was before; false if it cannot prove it."""
        if attend.rank not in self._tokens or not hmac.compare_digest(attend.token, self._tokens[attend.rank]):
            return False
        self._conns[attend.rank] = conn
        return True

    def leave(self, conn: ConnId) -> None:
        """Forget a connection that closed, a worker's or not."""
        self._conns = {rank: its for rank, its in self._conns.items() if its != conn}

    def rank_of(self, conn: ConnId) -> int | None:
        """Return which worker is behind a connection, or None."""
        return next((rank for rank, its in self._conns.items() if its == conn), None)

    def tell(self, rank: int, message: Message) -> None:
        """Tell a worker something; one that does not attend must be told when it comes."""
        if rank in self._conns:
            self._link.send(self._conns[rank], message)
