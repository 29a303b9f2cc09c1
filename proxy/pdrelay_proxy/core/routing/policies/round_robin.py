"""Take turns, so that every prefill engine works with every decode engine."""

from math import gcd
from typing import Final, TypeAlias

from pdrelay_proxy.core.fleet.compatibility import always
from pdrelay_proxy.core.model import ANY, Instance, InstanceId, RoutingHints
from pdrelay_proxy.core.routing.candidates import Among, Fits
from pdrelay_proxy.core.routing.pairing import Pair

_Set: TypeAlias = tuple[InstanceId, ...]
_MOST_SETS: Final = 256


class Rotation:
    """A turn counter for every set of engines; a set that is new goes on where all of them together
    are.

    With several models, or while a request avoids an engine, choices among different sets
    alternate. With one counter for all, a set could get every second turn, and use half of its
    engines.
    """

    __slots__ = ("_current", "_total", "_turn", "_turns")

    def __init__(self, total: int = 0) -> None:
        self._total = total  # turns of all sets together
        self._turns = dict[_Set, int]()  # of the sets but for the current one
        # the set of the last turn: a large one takes as long to be looked up as to be read
        self._current: _Set = ()
        self._turn = 0  # its next one

    def next(self, key: _Set) -> int:
        """Return the turn of a set, and count it."""
        if key is not self._current:
            self._turns[self._current] = self._turn
            self._current = key
            self._turn = self._turns.pop(key, self._total)
            if len(self._turns) >= _MOST_SETS:
                del self._turns[next(iter(self._turns))]
        turn = self._turn
        self._turn = turn + 1
        self._total += 1
        return turn

    def copy(self) -> "Rotation":
        """Return one that counts on from here by itself."""
        other = Rotation(self._total)
        other._turns = dict(self._turns)
        other._current = self._current
        other._turn = self._turn
        return other


class RoundRobin:
    """Picks both engines of a request from one turn counter.

    Two counters that advance together only ever meet in lcm(x, y) of the x*y pairs (with 2 prefill
    and 2 decode engines: P0-D0 and P1-D1). So after each such cycle the decode side is shifted by
    one. Any x*y turns in a row use every pair once, wherever they start; an engine that joins takes
    part from the next turn on.
    """

    def __init__(self, turns: Rotation | None = None, solo_turns: Rotation | None = None) -> None:
        self._turns = turns or Rotation()
        self._solo_turns = solo_turns or Rotation()
        self._last: tuple[Among, Among, _Set] | None = None
        self._last_one: tuple[Among, _Set] | None = None

    def pair(
        self, prefill: Among, decode: Among, _hints: RoutingHints = ANY, fits: Fits = always, /
    ) -> Pair:
        """Return the next pair.

        A prefill engine that does not fit all has turns of its own with those it fits.
        """
        before = self._last  # most often they are the same sequences as the last time
        if before is None or before[0] is not prefill or before[1] is not decode:
            before = self._last = prefill, decode, _names([*prefill, *decode])
        turn = self._turns.next(before[2])
        x = len(prefill)
        y = len(decode)
        first = prefill[turn % x]
        if fits is not always:
            fitting = _fitting(first, decode, fits)
            if len(fitting) < y:
                return first, fitting[self._turns.next(_names([first, *fitting])) % len(fitting)]
        cycles = gcd(x, y)
        shift = turn // (x * y // cycles) % cycles
        return first, decode[(turn + shift) % y]

    def choose(self, among: Among, _hints: RoutingHints = ANY, /) -> Instance:
        """Return the next engine; these turns do not disturb those of the pairs."""
        before = self._last_one
        if before is None or before[0] is not among:
            before = self._last_one = among, _names(among)
        return among[self._solo_turns.next(before[1]) % len(among)]

    def copy(self) -> "RoundRobin":
        """Return one that chooses alike, and whose choices leave no trace here."""
        return RoundRobin(self._turns.copy(), self._solo_turns.copy())


def _fitting(prefill: Instance, decode: Among, fits: Fits) -> Among:
    return [instance for instance in decode if fits(prefill, instance)]


def _names(among: Among) -> _Set:
    return tuple([instance.id for instance in among])
