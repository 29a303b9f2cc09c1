"""P's scheduler: asks a decode engine which blocks of a prompt its prefix cache has.

P asks only an engine that has connected to it, at the address that this engine has sent over that
connection: the params of a request name an engine, but no address. A successful search returns a
lease of D, which P reads as D reads P's. If a search takes too long, P computes the prompt, as it
would have done anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import Deadlines
from pdrelay_connector.core.ids import Address, ConnId, EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.messages import DropLeases, FindPrefix, PrefixFound, Reachable
from pdrelay_connector.core.ports import Link
from pdrelay_connector.core.session.peers import Peer, PeerState, PeerTable
from pdrelay_connector.core.sleep import known_as
from pdrelay_connector.core.state_machine import transition

# s without questions to an engine that did not answer in time: each delays a prefill
PAUSE: Final = 10.0


class SearchState(Enum):
    """State of a search."""

    CONNECTING = auto()
    ASKED = auto()
    OVER = auto()


class SearchEvent(Enum):
    """What can happen to a search."""

    SENT = auto()
    ENDED = auto()  # answered, timed out, or cancelled


TRANSITIONS: Final[Mapping[SearchState, Mapping[SearchEvent, SearchState]]] = {
    SearchState.CONNECTING: {
        SearchEvent.SENT: SearchState.ASKED,
        SearchEvent.ENDED: SearchState.OVER,
    },
    SearchState.ASKED: {SearchEvent.ENDED: SearchState.OVER},
    SearchState.OVER: {},
}


class SearchEnded(NamedTuple):
    """A search is over; ``params``: of the lease that D has granted; None: no blocks."""

    request: RequestId
    params: PullParams | None


@dataclass(slots=True)
class _Search:
    question: FindPrefix
    engine: EngineId
    address: Address
    state: SearchState = SearchState.CONNECTING

    def on(self, event: SearchEvent) -> None:
        self.state = transition(
            TRANSITIONS, self.state, event, f"the search for {self.question.request}"
        )

    def params(self, answer: PrefixFound) -> PullParams | None:
        """Return from where to load what was found; None: nothing, or more than was asked for."""
        tokens = len(answer.blocks) * answer.block_size
        if not answer.lease or not 0 < tokens <= len(self.question.tokens) // 4:
            return None
        return PullParams(
            remote_engine_id=self.engine,
            remote_request_id=answer.lease,
            remote_host=self.address.host,
            remote_port=self.address.port,
            remote_block_ids=(answer.blocks,),
            remote_num_tokens=tokens,
            pdrelay_block_sizes=(answer.block_size,),
        )


@dataclass(slots=True)
class _DecodeEngine:
    """A decode engine that has connected to us, and its listening address."""

    engine: EngineId  # of the present generation; a router knows all generations by one name
    conn: ConnId
    address: Address
    ask_at: float = -inf  # after a timeout it is not asked before this time


class PrefixFinder:
    """Runs on the control thread. ``timeout`` (s) bounds a search, the connection to D included."""

    def __init__(self, link: Link, peers: PeerTable, counters: Counters, *, timeout: float) -> None:
        self._link = link
        self._peers = peers
        self._counters = counters
        self._timeout = timeout
        self._engines: dict[EngineId, _DecodeEngine] = {}
        self._searches: dict[RequestId, _Search] = {}
        self._deadlines: Deadlines[RequestId] = Deadlines()
        self._ended: list[SearchEnded] = []

    def __len__(self) -> int:
        return len(self._searches)

    # ---- the engine

    def find(self, question: FindPrefix, engine: EngineId, *, now: float) -> None:
        """Start a search; its end comes out of :meth:`take_ended`."""
        decode_engine = self._engines.get(known_as(engine))
        if decode_engine is None:
            self._counters.count("prefixes_of_unknown_engines")
            self._ended.append(SearchEnded(question.request, None))
            return
        if now < decode_engine.ask_at:
            self._counters.count("prefixes_unanswered")
            self._ended.append(SearchEnded(question.request, None))
            return
        self._counters.count("prefixes_asked")
        search = self._searches[question.request] = _Search(
            question, decode_engine.engine, decode_engine.address
        )
        self._deadlines.set(question.request, now + self._timeout)
        self._send_question(
            search,
            self._peers.ensure_connected(decode_engine.engine, decode_engine.address, now=now),
        )

    def cancel(self, request: RequestId) -> None:
        """Cancel the search of a request that has ended; a lease found for it is dropped."""
        if request in self._searches:
            self._forget(self._searches[request])

    def give_back(self, params: PullParams) -> None:
        """Drop a lease whose request has ended in the meantime."""
        peer = self._peers.get(params.remote_engine_id)
        if peer is not None and peer.state is PeerState.CONNECTED:
            self._link.send(peer.conn, DropLeases((params.remote_request_id,)))

    def give_up(self) -> None:
        """End all searches: this engine goes to sleep."""
        for search in list(self._searches.values()):
            self._end(search, None)

    def take_ended(self) -> list[SearchEnded]:
        """Return the searches that have ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    # ---- the network

    def learn_address(self, conn: ConnId, message: Reachable) -> None:
        """Learn the listening address of a decode engine, sent over its own connection."""
        engine = self._link.engine_of(conn)
        if engine is not None:
            self._engines[known_as(engine)] = _DecodeEngine(
                engine, conn, Address(message.host, message.port)
            )

    def lost(self, conn: ConnId) -> None:
        """A connection that was opened to us has closed."""
        for engine, decode_engine in list(self._engines.items()):
            if decode_engine.conn == conn:
                del self._engines[engine]

    def peer_changed(self, peer: Peer) -> None:
        """Continue, or end, the searches at a decode engine whose connection has changed."""
        for search in [
            search for search in self._searches.values() if search.engine == peer.engine
        ]:
            self._send_question(search, peer)

    def answered(self, conn: ConnId, answer: PrefixFound) -> None:
        """Handle an answer; a lease without a waiting search is dropped."""
        search = self._asked(conn, answer.request)
        params = search.params(answer) if search is not None else None
        if params is None and answer.lease:
            self._link.send(conn, DropLeases((answer.lease,)))
        if search is not None:
            self._end(search, params)

    def _asked(self, conn: ConnId, request: RequestId) -> _Search | None:
        """Return the search that an engine answers; None: it is over, or another engine's."""
        search = self._searches.get(request)
        peer = self._peers.find(conn)
        if search is None or peer is None or peer.engine != search.engine:
            return None
        return search if search.state is SearchState.ASKED else None

    def advance(self, *, now: float) -> float | None:
        """End the searches that take too long; return when to be called again at the latest."""
        for request in self._deadlines.take_due(now=now):
            self._counters.count("prefixes_unanswered")
            search = self._searches[request]
            if (decode_engine := self._engines.get(known_as(search.engine))) is not None:
                decode_engine.ask_at = now + PAUSE
            self._end(search, None)
        return self._deadlines.next()

    def _send_question(self, search: _Search, peer: Peer) -> None:
        if peer.state is PeerState.CONNECTED and search.state is SearchState.CONNECTING:
            search.on(SearchEvent.SENT)
            self._link.send(peer.conn, search.question)
        elif peer.state is not PeerState.CONNECTING and peer.state is not PeerState.CONNECTED:
            self._counters.count("prefixes_unanswered")
            self._end(search, None)

    def _end(self, search: _Search, params: PullParams | None) -> None:
        self._forget(search)
        self._ended.append(SearchEnded(search.question.request, params))

    def _forget(self, search: _Search) -> None:
        search.on(SearchEvent.ENDED)
        del self._searches[search.question.request]
        self._deadlines.discard(search.question.request)
