"""Which memory of other engines we can reach, and how KV travels to and from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xpyd_connector.core.ids import EngineId
from xpyd_connector.core.layout.transfer_plan import Route, Spans, Stretch, check_shapes, needed_ranks, pull_route
from xpyd_connector.core.messages import RankInfo
from xpyd_connector.core.ports import Mover
from xpyd_connector.errors import ConnectorError, IncompatiblePeer


@dataclass(frozen=True, slots=True)
class Way:
    """One remote rank, and what our rank takes from it."""

    handle: str  # the mover's
    route: Route


@dataclass(frozen=True, slots=True)
class Reached:
    """An engine we can read from: every rank of it that keeps something our rank needs."""

    ways: tuple[Way, ...]
    theirs: RankInfo  # one of its ranks: in what is not an address, all are alike

    def spans(self, stretches: Sequence[Stretch]) -> list[tuple[str, Spans]]:
        """Return what to read from which rank; raises :exc:`~xpyd_connector.errors.ProtocolViolation`."""
        found = [(way.handle, way.route.spans(stretches)) for way in self.ways]
        return [(handle, spans) for handle, spans in found if len(spans)]


class Reach:
    """Attaches the ranks of prefill engines, all that are needed or none."""

    def __init__(self, mover: Mover, own: RankInfo) -> None:
        self._mover = mover
        self._own = own
        self._reached: dict[EngineId, Reached] = {}

    def __getitem__(self, engine: EngineId) -> Reached:
        return self._reached[engine]

    def __iter__(self) -> Iterator[EngineId]:
        return iter(self._reached)

    def attach(self, engine: EngineId, ranks: Sequence[RankInfo]) -> None:
        """Make an engine's memory readable; raises a ``ConnectorError`` that says why it cannot be."""
        needed = self._needed(engine, ranks)
        handles: list[str] = []
        try:
            handles.extend(self._mover.attach(theirs) for theirs in needed)
        except ConnectorError:
            for handle in handles:
                self._mover.detach(handle)
            raise
        ways = (Way(handle, pull_route(self._own, theirs)) for handle, theirs in zip(handles, needed, strict=True))
        self._reached[engine] = Reached(tuple(ways), needed[0])

    def detach(self, engine: EngineId) -> None:
        """Forget an engine, reached or not."""
        if (reached := self._reached.pop(engine, None)) is not None:
            for way in reached.ways:
                self._mover.detach(way.handle)

    def _needed(self, engine: EngineId, ranks: Sequence[RankInfo]) -> list[RankInfo]:
        known = {info.rank: info for info in ranks}
        if not known:
            raise IncompatiblePeer(f"engine {engine} has no ranks")
        if len(sizes := sorted({info.ranks for info in known.values()})) > 1:
            raise IncompatiblePeer(f"ranks of engine {engine} say that there are {sizes[0]} and {sizes[1]} of them")
        for theirs in known.values():
            check_shapes(self._own, theirs)
        wanted = needed_ranks(self._own, sizes[0])
        if missing := [rank for rank in wanted if rank not in known]:
            raise IncompatiblePeer(
                f"engine {engine} says nothing of its rank {missing[0]}, whose heads are needed here"
            )
        return [known[rank] for rank in wanted]
