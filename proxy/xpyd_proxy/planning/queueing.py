"""How long work waits before a set of equal servers: textbook approximations, each with its source.

All of them want arrivals that are independent of each other (Poisson) and a load that lasts; a burst is worse.
``tests/proxy/planning/test_queueing.py`` compares them with a simulation.
"""

from dataclasses import dataclass
from math import exp, inf, log, sqrt

_Z95 = 1.6448536269514722  # 95 % of a normal distribution lie below its mean plus this many standard deviations
MOST_SKEWED = exp(_Z95**2 / 2)  # no lognormal distribution has a p95 above so many means: 3.87


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity that differs from request to request, in whatever unit."""

    mean: float
    cv2: float  # squared coefficient of variation: variance / mean^2
    p95: float

    @classmethod
    def lognormal(cls, mean: float, p95: float) -> "Spread":
        """Fit a lognormal distribution, which lengths of prompts and answers resemble.

        From p95 / mean = exp(z s - s^2 / 2), z = 1.645, follows s, and cv^2 = exp(s^2) - 1. Of two solutions the
        narrower one is meant. ``p95`` must be 1 to ``MOST_SKEWED`` times ``mean``.
        """
        sigma = _Z95 - sqrt(max(0.0, _Z95**2 - 2 * log(p95 / mean)))
        return cls(mean, exp(sigma**2) - 1, p95)

    @classmethod
    def exponential(cls, mean: float) -> "Spread":
        """Assume as much where only the mean is known: cv^2 = 1, p95 = mean * ln 20."""
        return cls(mean, 1.0, mean * log(20))

    def times(self, factor: float) -> "Spread":
        """Return the same in another unit."""
        return Spread(self.mean * factor, self.cv2, self.p95 * factor)


@dataclass(frozen=True, slots=True)
class Wait:
    """The time from arrival to the beginning of service."""

    chance: float  # that there is any
    mean: float  # of all, those that do not wait included

    @property
    def p95(self) -> float:
        """Return the 95th percentile, as if those who wait did so for exponentially distributed times.

        That is exact for M/M/c and what Whitt (The Queueing Network Analyzer, 1983) starts from for others.
        """
        if self.chance <= 0.05:
            return 0.0
        return self.mean / self.chance * log(self.chance / 0.05)


FOREVER = Wait(1.0, inf)


def erlang_c(servers: int, offered: float) -> float:
    """Return the chance that an arrival waits in M/M/c; ``offered``: mean number of busy servers, below ``servers``.

    Source: A. K. Erlang, 1917; by the recursion for the loss formula, which does not overflow.
    """
    loss = 1.0
    for count in range(1, servers + 1):
        loss = offered * loss / (count + offered * loss)
    return loss / (1 - offered / servers * (1 - loss))


def shared_queue(servers: int, rate: float, service: Spread) -> Wait:
    """Return the wait in one queue before all servers (M/G/c): what choosing the least loaded engine comes close to.

    Source: Allen and Cunneen (A. O. Allen, Probability, Statistics and Queueing Theory, 1990), for Poisson arrivals
    the same as Lee and Longton, 1959: the wait of M/M/c times (1 + cv^2) / 2. With one server that is the formula of
    Pollaczek and Khinchine, which is exact; with cv^2 = 0 it is M/D/c.
    """
    offered = rate * service.mean
    if offered >= servers:
        return FOREVER
    chance = erlang_c(servers, offered)
    return Wait(chance, chance * service.mean / (servers - offered) * (1 + service.cv2) / 2)


def queues_in_turn(servers: int, rate: float, service: Spread) -> Wait:
    """Return the wait before one of several servers that get the arrivals in turn, each with a queue of its own.

    Every c-th arrival of a Poisson stream comes to one server: the times between are Erlang distributed, with a
    squared coefficient of variation of 1 / c. Source of the wait of such a GI/G/1 queue: Kraemer and Langenbach-Belz,
    1976; the chance to wait from the same, as Whitt gives it (1983). With one server it is shared_queue's.
    """
    busy = rate * service.mean / servers
    if busy >= 1:
        return FOREVER
    ca2, cs2 = 1 / servers, service.cv2
    damping = exp(-2 * (1 - busy) / (3 * busy) * (1 - ca2) ** 2 / (ca2 + cs2))
    mean = busy * service.mean / (1 - busy) * (ca2 + cs2) / 2 * damping
    bend = (1 + ca2 + busy * cs2) / (1 + busy * (cs2 - 1) + busy**2 * (4 * ca2 + cs2))
    return Wait(busy + (ca2 - 1) * busy * (1 - busy) * bend, mean)
