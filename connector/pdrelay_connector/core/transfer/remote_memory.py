"""The memory of other engines that we can reach, and the routes of KV to and from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdrelay_connector.core.ids import EngineId
from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.source_ranks import needed_ranks
from pdrelay_connector.core.layout.transfer_plan import Route, Spans, TokenRange, pull_route
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.ports import TransferAgent
from pdrelay_connector.errors import ConnectorError, IncompatiblePeer


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """One remote rank, and the route between its memory and our rank's."""

    handle: str  # of the transfer agent
    route: Route


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine we can read from: all of its ranks that keep heads our rank needs."""

    remote_ranks: tuple[RemoteRank, ...]
    theirs: RankInfo  # one of its ranks: in what is not an address, all are alike

    def spans(self, token_ranges: Sequence[TokenRange]) -> list[tuple[str, Spans]]:
        """Return the spans by rank; raises :exc:`~pdrelay_connector.errors.ProtocolViolation`."""
        by_rank = [
            (remote_rank.handle, remote_rank.route.spans(token_ranges))
            for remote_rank in self.remote_ranks
        ]
        return [(handle, spans) for handle, spans in by_rank if len(spans)]


class RemoteEngines:
    """Attaches all needed ranks of a prefill engine, or none."""

    def __init__(self, transfer_agent: TransferAgent, own: RankInfo) -> None:
        self._transfer_agent = transfer_agent
        self._own = own
        self._reached: dict[EngineId, RemoteEngine] = {}

    def __getitem__(self, engine: EngineId) -> RemoteEngine:
        return self._reached[engine]

    def __iter__(self) -> Iterator[EngineId]:
        return iter(self._reached)

    def attach(self, engine: EngineId, ranks: Sequence[RankInfo]) -> None:
        """Make an engine's memory reachable; raises a ``ConnectorError`` that says why not."""
        needed = self._needed(engine, ranks)
        handles: list[str] = []
        try:
            handles.extend(self._transfer_agent.attach(theirs) for theirs in needed)
        except ConnectorError:
            for handle in handles:
                self._transfer_agent.detach(handle)
            raise
        remote_ranks = (
            RemoteRank(handle, pull_route(self._own, theirs))
            for handle, theirs in zip(handles, needed, strict=True)
        )
        self._reached[engine] = RemoteEngine(tuple(remote_ranks), needed[0])

    def detach(self, engine: EngineId) -> None:
        """Forget an engine, reached or not."""
        if (reached := self._reached.pop(engine, None)) is not None:
            for remote_rank in reached.remote_ranks:
                self._transfer_agent.detach(remote_rank.handle)

    def _needed(self, engine: EngineId, ranks: Sequence[RankInfo]) -> Sequence[RankInfo]:
        if not ranks:
            raise IncompatiblePeer(f"engine {engine} has no ranks")
        if len(sizes := sorted({(info.stages, info.ranks) for info in ranks})) > 1:
            first, second = (stages * size for stages, size in sizes[:2])
            raise IncompatiblePeer(
                f"ranks of engine {engine} say that there are {first} and {second} of them"
            )
        for theirs in ranks:
            check_shapes(self._own, theirs)
        return needed_ranks(self._own, ranks)
