"""What one engine of a role can do, learned from all engines of that role: an engine that turns
will be like them.

Earlier measurements fade while there are new ones. What was learned is kept while there is no
traffic.
"""

from typing import Final

_HALF_LIFE_S: Final = 180.0
# the same of prefill rates: whether an engine is busy shows at looks alone, so more of them count
_LONG_S: Final = 600.0
_SURE_S: Final = 20.0  # seconds of work of one engine, from which on its rate is known
_LOOKED_S: Final = 30.0  # of looks that showed some work, from which on a rate of less work will do
# looks at an engine with streams, from which on the time between tokens is known
_SURE: Final = 10.0
_DOUBLING: Final = 100.0  # streams that double the time between tokens, before it shows
_FEW: Final = 3.0  # streams, up to which one more or less tells little of many
# streams, below which they differ by how slow steps are rather than by how many there are
_IDLE: Final = 1.5
_FLAT: Final = 0.002  # square of the relative spread of batches, from which on they show it
_LEAST: Final = 0.25  # of what is expected of the next stream: less is noise


class PrefillRate:
    """Prompt tokens that a prefill engine computes in a second in which it has a request.

    Engines with little to do need minutes for work that makes their rate sure. That they have
    little to do is known long before, and an error of their rate is small beside it; the first look
    at much work outweighs all of it.
    """

    def __init__(self) -> None:
        self._tokens = self._busy_s = self._looked_s = 0.0

    def add(self, tokens: float, busy_s: float, elapsed_s: float) -> None:
        """Take in what all engines have computed since the last look; ``busy_s``: of all of them
        together.
        """
        if busy_s <= 0 and tokens <= 0:
            return
        kept = 0.5 ** (elapsed_s / _LONG_S)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + busy_s
        self._looked_s += elapsed_s

    @property
    def per_s(self) -> float | None:
        """Return the rate; None: too little was computed to tell."""
        is_known = self._busy_s >= _SURE_S or self._looked_s >= _LOOKED_S
        return (
            self._tokens / self._busy_s
            if is_known and self._tokens > 0 and self._busy_s > 0
            else None
        )


class DecodeLine:
    """The time between two tokens by the streams of an engine: a line.

    A step that is slow for a reason of its own makes more streams of the same tokens: a line by
    least squares through such looks runs through the origin, and a nearly idle engine seems to be
    full. For such engines the tokens of a second decide, as an instrumental variable. They tell
    nothing of an engine that makes all it can, whose batches have any size at the same tokens: for
    all others it is least squares.

    Where all looks were about the same it is not known what the next stream costs: then a vague
    expectation decides, that 100 streams double the time.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._z = self._xz = self._yz = self._xx = self._xy = 0.0

    def fade(self, elapsed_s: float) -> None:
        """Let what is known so far count less; once for each look that has streams."""
        kept = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self._weight = self._weight * kept
        self._x = self._x * kept
        self._y = self._y * kept
        self._z = self._z * kept
        self._xz = self._xz * kept
        self._yz = self._yz * kept
        self._xx = self._xx * kept
        self._xy = self._xy * kept

    def add(self, batch: float, itl_s: float) -> None:
        """Take in what one engine showed: its streams and their time between tokens (above 0),
        means of a look.
        """
        self._weight += 1.0
        self._x += batch
        self._y += itl_s
        tokens_per_s = batch / itl_s
        self._z += tokens_per_s
        self._xz += batch * tokens_per_s
        self._yz += itl_s * tokens_per_s
        self._xx += batch * batch
        self._xy += batch * itl_s

    def tokens_per_s(self, itl_s: float, slots: int | None) -> float | None:
        """Return the tokens an engine makes in a second, with as many streams as this time between
        tokens allows.

        ``slots``: most streams of an engine; None: no limit is known. None: nothing was measured.
        """
        batch = self.batch(itl_s, slots)
        return None if batch is None else batch / self._at(batch)

    def batch(self, itl_s: float, slots: int | None) -> float | None:
        """Return how many streams an engine can have at this time between tokens, at least one;
        None: unknown.
        """
        if self._weight < _SURE or self._y <= 0:
            return None
        base, slope = self._line()
        most = max(1.0, (itl_s - base) / slope)
        return most if slots is None else min(most, float(slots))

    def _at(self, batch: float) -> float:
        base, slope = self._line()
        return base + slope * batch

    def _line(self) -> tuple[float, float]:
        x = self._x / self._weight
        y = self._y / self._weight
        z = self._z / self._weight
        # of one token a second
        likely = y / (_DOUBLING + x)
        streams = x / z
        spread = max(0.0, self._xx / self._weight - x * x)
        together = self._xy / self._weight - x * y
        by_tokens = (self._xz / self._weight - x * z) * streams
        if x < _IDLE and by_tokens > 0:
            spread = by_tokens
            together = (self._yz / self._weight - y * z) * streams
        doubt = _FLAT * max(x * x, _FEW * _FEW)
        slope = max((together + doubt * likely) / (spread + doubt), _LEAST * likely)
        slope = min(slope, y / max(x, 1e-9))
        return y - slope * x, slope
