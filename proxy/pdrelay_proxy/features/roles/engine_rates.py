"""The rates of one engine of a role, learned from all engines of the role.

They are expected of an engine that changes to the role. Earlier measurements fade while there are
new ones; without traffic the rates stay.
"""

from typing import Final

_HALF_LIFE_S: Final = 180.0
# the half-life of prefill rates: a sample only shows whether an engine is busy, so more are needed
_LONG_S: Final = 600.0
_SURE_S: Final = 20.0  # seconds of work of an engine after which its rate is known
_LOOKED_S: Final = 30.0  # seconds of samples with some work after which the rate is known, too
# samples of an engine with streams after which its ITL is known
_SURE: Final = 10.0
_DOUBLING: Final = 100.0  # streams that double the ITL, as long as measurements do not show it
_FEW: Final = 3.0  # up to so many streams, one more or less says little about many
# below so many streams, samples differ by the speed of steps rather than by their streams
_IDLE: Final = 1.5
_FLAT: Final = 0.002  # squared relative spread of batches from which on they show the slope
_LEAST: Final = 0.25  # of the expected slope: less is noise


class PrefillRate:
    """The prompt tokens that a prefill engine computes in a busy second.

    Engines with little load need minutes until their rate is certain. But it is soon certain that
    their load is little, and then an error of the rate hardly matters; the first sample of a high
    load outweighs all of them.
    """

    def __init__(self) -> None:
        self._tokens = self._busy_s = self._observed_s = 0.0

    def add(self, tokens: float, busy_s: float, elapsed_s: float) -> None:
        """Add the work of all engines since the last samples; ``busy_s``: their sum."""
        if busy_s <= 0 and tokens <= 0:
            return
        fading = 0.5 ** (elapsed_s / _LONG_S)
        self._tokens = self._tokens * fading + tokens
        self._busy_s = self._busy_s * fading + busy_s
        self._observed_s += elapsed_s

    @property
    def per_s(self) -> float | None:
        """Return the rate; None: too little work was measured."""
        is_known = self._busy_s >= _SURE_S or self._observed_s >= _LOOKED_S
        return (
            self._tokens / self._busy_s
            if is_known and self._tokens > 0 and self._busy_s > 0
            else None
        )


class DecodeLine:
    """The ITL of an engine as a line over its number of streams.

    On a nearly idle engine a slow step raises the number of streams as well as the ITL, so least
    squares would draw the line through the origin, and the engine would seem to be full. For such
    engines the tokens of a second are used as an instrumental variable. They say nothing about an
    engine at full speed, whose batch has any size at the same tokens: all others use least squares.

    If all samples have about the same batch, the cost of one more stream is not known: then a prior
    decides, by which 100 streams double the ITL.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._z = self._xz = self._yz = self._xx = self._xy = 0.0

    def fade(self, elapsed_s: float) -> None:
        """Reduce the weight of earlier samples; call it once for samples with streams."""
        fading = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self._weight = self._weight * fading
        self._x = self._x * fading
        self._y = self._y * fading
        self._z = self._z * fading
        self._xz = self._xz * fading
        self._yz = self._yz * fading
        self._xx = self._xx * fading
        self._xy = self._xy * fading

    def add(self, batch: float, itl_s: float) -> None:
        """Add a sample of one engine: its mean streams, and their mean ITL (above 0)."""
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
        """Return the tokens a second of an engine with as many streams as this ITL allows.

        ``slots``: most streams of an engine; None: no known limit. Returns None: not measured.
        """
        batch = self.batch(itl_s, slots)
        return None if batch is None else batch / self._at(batch)

    def batch(self, itl_s: float, slots: int | None) -> float | None:
        """Return how many streams an engine can have at this ITL, at least one; None: unknown."""
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
