"""Take turns, so that every prefill engine works with every decode engine."""

from collections.abc import Sequence
from math import gcd

from xpyd_proxy.core.model import Instance


class RoundRobin:
    """Picks both engines of a request from one turn counter.

    Two counters that advance together only ever meet in lcm(x, y) of the x*y pairs (with 2 prefill and 2 decode
    engines: P0-D0 and P1-D1). So after each such cycle the decode side is shifted by one. Any x*y turns in a row
    use every pair once, wherever they start; an engine that joins takes part from the next turn on.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._solo_turn = 0

    def pair(self, prefill: Sequence[Instance], decode: Sequence[Instance], /) -> tuple[Instance, Instance]:
        """Return the next pair."""
        turn, self._turn = self._turn, self._turn + 1
        x, y = len(prefill), len(decode)
        cycles = gcd(x, y)
        shift = turn // (x * y // cycles) % cycles
        return prefill[turn % x], decode[(turn + shift) % y]

    def one(self, decode: Sequence[Instance], /) -> Instance:
        """Return the next decode engine; these turns do not disturb those of the pairs."""
        turn, self._solo_turn = self._solo_turn, self._solo_turn + 1
        return decode[turn % len(decode)]
