"""The engine that has seen the longest beginning of the prompt, while it is not overloaded."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from xpyd_proxy.core.model import ANY, Instance, InstanceId, RoutingHints
from xpyd_proxy.core.routing.pairing import Policy

Seen: TypeAlias = OrderedDict[tuple[InstanceId, bytes], None]
BLOCK: Final = 256  # bytes of the prompt's JSON
MOST_BLOCKS: Final = 256  # of a prompt; what it says later hardly makes two prompts of one beginning different
MOST_ENTRIES: Final = 100_000  # of all prompts and engines: about 20 MB
SLACK: Final = 4.0  # how much more load than the least loaded engine an engine may have and still be preferred


class Prefix:
    """Remembers which engine was chosen for which blocks, as a prefix cache would; the oldest are forgotten."""

    def __init__(
        self,
        load: Callable[[Instance], float],
        otherwise: Policy,
        *,
        most: int = MOST_ENTRIES,
        seen: Seen | None = None,
    ) -> None:
        self._load = load
        self._otherwise = otherwise
        self._most = most
        self._seen: Seen = OrderedDict() if seen is None else seen

    def one(self, among: Sequence[Instance], ask: RoutingHints = ANY, /) -> Instance:
        """Return the engine with the longest match that has room; equals and newcomers go by the other policy."""
        blocks = list(_chain(ask.prompt))
        most = min(map(self._load, among)) + SLACK
        matches = dict[InstanceId, int]()
        for instance in among:
            if self._load(instance) <= most:
                unseen = (count for count, block in enumerate(blocks) if (instance.id, block) not in self._seen)
                matches[instance.id] = next(unseen, len(blocks))
        longest = max(matches.values())
        best = [instance for instance in among if matches.get(instance.id) == longest]
        chosen = best[0] if len(best) == 1 else self._otherwise.one(best, ask)
        for block in reversed(blocks):  # the beginning is forgotten last: without it the rest is of no use
            self._seen[chosen.id, block] = None
            self._seen.move_to_end((chosen.id, block))
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return chosen

    def copy(self) -> "Prefix":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return Prefix(self._load, self._otherwise.copy(), most=self._most, seen=self._seen.copy())


def _chain(prompt: bytes) -> Iterator[bytes]:
    """Name each whole block by all that came before it, too."""
    name = b""
    for start in range(0, min(len(prompt) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        name = blake2b(prompt[start : start + BLOCK], key=name, digest_size=12).digest()
        yield name
