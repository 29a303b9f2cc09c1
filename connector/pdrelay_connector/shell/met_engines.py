"""The prefill engines that a decode engine has met, and whether KV of theirs can be loaded."""

from pdrelay_connector.core.ids import EngineId
from pdrelay_connector.core.results import HandshakeEnded

# engines, each of which restarts under another id; after that they are met as new ones
MAX_KNOWN = 4096


class MetEngines:
    """The final ends of handshakes, and what metrics have yet to hear of them."""

    def __init__(self) -> None:
        self._handshakes: dict[EngineId, HandshakeEnded] = {}
        # engines that were found to differ, oldest first
        self._differing: dict[EngineId, None] = {}
        # since they were last taken
        self._incompatible: list[EngineId] = []
        self._compatible: list[EngineId] = []  # that differed before

    def get(self, engine: EngineId) -> HandshakeEnded | None:
        """Return the end of an engine's handshake; None: it has to be met."""
        return self._handshakes.get(engine)

    def add(self, ended: HandshakeEnded) -> None:
        """Remember the end of a handshake, unless another attempt may end otherwise."""
        if not ended.is_final:
            return
        if len(self._handshakes) >= MAX_KNOWN:
            self._handshakes.clear()
        self._handshakes[ended.engine] = ended
        if ended.objection and ended.engine not in self._differing:
            self._incompatible.append(ended.engine)
            self._differing[ended.engine] = None
            if len(self._differing) > MAX_KNOWN:
                del self._differing[next(iter(self._differing))]
        elif not ended.objection and ended.engine in self._differing:
            del self._differing[ended.engine]
            self._compatible.append(ended.engine)

    def lose(self, engine: EngineId) -> None:
        """Meet an engine anew: its connection has ended."""
        self._handshakes.pop(engine, None)

    def lose_all(self) -> None:
        """Meet all engines anew."""
        self._handshakes.clear()

    def take_incompatible(self) -> list[str]:
        """Return the engines that were found incompatible since the last call."""
        engines = self._incompatible
        self._incompatible = []
        return list(map(str, engines))

    def take_compatible(self) -> list[str]:
        """Return the engines that became compatible since the last call, by a restart."""
        engines = self._compatible
        self._compatible = []
        return list(map(str, engines))
