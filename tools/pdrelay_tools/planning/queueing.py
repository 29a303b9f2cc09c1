"""How long requests wait for one of several equal servers: approximations, each with its source.

All assume independent arrivals (Poisson) and a steady load; a burst waits longer.
``tests/tools/planning/test_queueing.py`` compares them with a simulation.
"""

from dataclasses import dataclass
from math import exp, inf, log, sqrt

# 95 % of a normal distribution lie below its mean plus this many standard deviations
_Z95 = 1.6448536269514722
_ROUTERS = 2.6  # see among_routers
MOST_SKEWED = exp(_Z95**2 / 2)  # no lognormal distribution has a p95 above so many means: 3.87


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a quantity over requests, in any unit."""

    mean: float
    cv2: float  # squared coefficient of variation: variance / mean^2
    p95: float

    @classmethod
    def lognormal(cls, mean: float, p95: float) -> "Spread":
        """Fit a lognormal distribution, which lengths of prompts and answers resemble.

        From p95 / mean = exp(z s - s^2 / 2), z = 1.645, follows s, and cv^2 = exp(s^2) - 1. Of two
        solutions the narrower one is meant. ``p95`` must be 1 to ``MOST_SKEWED`` times ``mean``.
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
        """Return the 95th percentile, as if those that wait had exponential waiting times.

        That is exact for M/M/c; Whitt (The Queueing Network Analyzer, 1983) starts from it for
        other queues.
        """
        if self.chance <= 0.05:
            return 0.0
        return self.mean / self.chance * log(self.chance / 0.05)


FOREVER = Wait(1.0, inf)


def erlang_c(servers: int, offered: float) -> float:
    """Return the chance that an arrival waits in M/M/c.

    ``offered``: mean number of busy servers, below ``servers``. Source: A. K. Erlang, 1917; by the
    recursion for the loss formula, which does not overflow.
    """
    loss = 1.0
    for count in range(1, servers + 1):
        loss = offered * loss / (count + offered * loss)
    return loss / (1 - offered / servers * (1 - loss))


def shared_queue(servers: int, rate: float, service: Spread) -> Wait:
    """Return the wait in one queue before all servers (M/G/c), which least_loaded comes close to.

    Source: Allen and Cunneen (A. O. Allen, Probability, Statistics and Queueing Theory, 1990), for
    Poisson arrivals the same as Lee and Longton, 1959: the wait of M/M/c times (1 + cv^2) / 2. With
    one server that is the formula of Pollaczek and Khinchine, which is exact; with cv^2 = 0 it is
    M/D/c.
    """
    offered = rate * service.mean
    if offered >= servers:
        return FOREVER
    chance = erlang_c(servers, offered)
    return Wait(chance, chance * service.mean / (servers - offered) * (1 + service.cv2) / 2)


def queues_in_turn(servers: int, rate: float, service: Spread) -> Wait:
    """Return the wait in the queue of one of several servers that get the arrivals round robin.

    Every c-th arrival of a Poisson stream comes to one server: the times between are Erlang
    distributed, with a squared coefficient of variation of 1 / c. Source of the wait of such a
    GI/G/1 queue: Kraemer and Langenbach-Belz, 1976; the chance to wait from the same, as Whitt
    gives it (1983). With one server it is shared_queue's.
    """
    busy = rate * service.mean / servers
    if busy >= 1:
        return FOREVER
    ca2 = 1 / servers
    cs2 = service.cv2
    damping = exp(-2 * (1 - busy) / (3 * busy) * (1 - ca2) ** 2 / (ca2 + cs2))
    mean = busy * service.mean / (1 - busy) * (ca2 + cs2) / 2 * damping
    bend = (1 + ca2 + busy * cs2) / (1 + busy * (cs2 - 1) + busy**2 * (4 * ca2 + cs2))
    return Wait(busy + (ca2 - 1) * busy * (1 - busy) * bend, mean)


def two_choices(servers: int, rate: float, service: Spread) -> Wait:
    """Return the wait in the shorter of two queues that are picked at random.

    Source: Mitzenmacher (The Power of Two Choices in Randomized Load Balancing, 1996), for
    exponential times and many servers: the share of servers with i requests or more is r^(2^i - 1).
    For others (1 + cv^2) / 2 as in shared_queue; 1 + 1 / c for few servers is fitted to the
    simulation.
    """
    busy = rate * service.mean / servers
    best = shared_queue(servers, rate, service)
    if servers == 1 or busy >= 1:
        return best
    series = sum(busy ** (2.0**count - 2) for count in range(2, 12))
    mean = series * service.mean * (1 + service.cv2) / 2 * (1 + 1 / servers)
    return Wait(max(best.chance, busy**2), max(best.mean, mean))


def at_random(servers: int, rate: float, service: Spread) -> Wait:
    """Return the wait in a queue that is picked at random: M/G/1 (Pollaczek-Khinchine, exact)."""
    return shared_queue(1, rate / servers, service)


def among_routers(alone: Wait, random: Wait, routers: int, busy: float) -> Wait:
    """Return the wait behind several routers that do not know of each other's requests.

    Each knows only its own requests, so with more routers the choice comes close to a random one.
    The wait goes from that of one router (``alone``) to that of a random choice as n / (n + k),
    where n is the number of other routers; k grows with the load, and is fitted to the simulation
    in tests/support/several_routers.py.
    """
    other_routers = routers - 1
    if other_routers == 0 or random.mean == inf:
        return alone
    part = other_routers / (other_routers + _ROUTERS / (1 - busy))
    chance = alone.chance + (random.chance - alone.chance) * part
    return Wait(chance, alone.mean + (random.mean - alone.mean) * part)
