"""What tests say to a running router and read of it: orders for engines, their states, and streams that moved."""

from collections import Counter

import httpx

from support.fixtures import ADMIN_KEY
from support.greedy_streams import run

KEY = {"X-Api-Key": ADMIN_KEY}


def states(url):
    return [row["state"] for row in httpx.get(f"{url}/stats", trust_env=False).json()["instances"]]


def order(url, verb, name, **more):
    body = {"id": name} | more
    response = httpx.post(f"{url}/instances/{verb}", json=body, headers=KEY, trust_env=False, timeout=30)
    assert response.status_code == 200, response.text


def instances(url):
    return httpx.get(f"{url}/instances", headers=KEY, trust_env=False, timeout=30).json()["instances"]


def row(url, name):
    return next(row for row in instances(url) if row["id"] == name)


def moved_streams(url):
    """What has become of the streams that were to move."""
    text, found = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text, Counter()
    for line in text.splitlines():
        if line.startswith("xpyd_streams_moved_total{"):
            found[line.split('outcome="')[1].split('"')[0]] = int(float(line.rsplit(" ", 1)[1]))
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
