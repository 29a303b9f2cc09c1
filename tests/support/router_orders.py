"""What tests say to a running router and read of it: orders for engines, their states, turns, streams that moved."""

import threading
import time
from collections import Counter

import httpx

from support.cluster import wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import run

KEY = {"X-Api-Key": ADMIN_KEY}


def states(url):
    return [row["state"] for row in httpx.get(f"{url}/stats", trust_env=False, timeout=20).json()["instances"]]


def order(url, verb, name, **more):
    body = {"id": name} | more
    response = httpx.post(f"{url}/instances/{verb}", json=body, headers=KEY, trust_env=False, timeout=30)
    assert response.status_code == 200, response.text


def rows(url):
    """Return what a router knows of each engine, by its id."""
    found = httpx.get(f"{url}/instances", headers=KEY, trust_env=False, timeout=30).json()["instances"]
    return {row["id"]: row for row in found}


def wait_known(url):
    """Wait until a router has read the metrics of all engines."""
    wait_until(lambda: all(row["version"] and row["connector"] for row in rows(url).values()), seconds=30, what="known")


def turn(url, name, to):
    """Turn an engine, and return how many seconds that took."""
    start = time.monotonic()
    order(url, "turn", name, to=to)
    wait_until(lambda: serves(url, name, to), seconds=200, what=f"{name} serves {to}")
    return time.monotonic() - start


def serves(url, name, role):
    """Whether an engine has turned to a role."""
    row = rows(url)[name]
    return row["role"] == role and row["turns_to"] is None


def counted(url, name):
    """Return the values of a counter of a router, by its series."""
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)}


def moved_streams(url):
    """Return what has become of the streams that were to move, whatever for."""
    found = Counter()
    for name, value in counted(url, "pdrelay_streams_moved_total{").items():
        found[name.split('outcome="')[1].split('"')[0]] += int(value)
    return found


def all_at(url, busy, idle, asked, act, *, behind):
    """Run streams that all begin at one decode engine."""
    order(url, "drain", idle)

    def then():
        order(url, "undrain", idle)
        act()

    streams = run(url, asked, then, behind=behind)
    order(url, "undrain", busy)
    return streams


class Wave:
    """Streams that run beside what a test does."""

    def __init__(self, url, asked):
        self._asked = list(asked)
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self.streams = []
        self._thread.start()
        assert self._begun.wait(200), "the streams have not begun"

    def _run(self, url):
        self.streams = run(url, self._asked, self._begun.set, behind=20)

    def end(self, expected):
        """Wait for the end, and return what has become of the streams."""
        self._thread.join(300)
        return [one.verdict(other) for one, other in zip(self.streams, expected, strict=True)]
