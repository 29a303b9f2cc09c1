"""Makes the picture of the status page in the documentation: a simulated fleet, five minutes of work, some failures.

``PYTHONPATH=tests .venv/bin/python -m support.status_picture docs/status-page.png [SECONDS]``
"""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.browser import browser
from support.sim import cluster

_RATE = 5  # requests a second
_LOOKS = {"": {"width": 1280}, "-phone": {"width": 390, "scale": 2}, "-dark": {"width": 1280, "dark": True}}


def _work(url, seconds):
    """Ask for texts of some length, at random times, for so long."""
    dice = random.Random(7)
    end = time.monotonic() + seconds
    with httpx.Client(timeout=30) as client, ThreadPoolExecutor(32) as pool:
        while time.monotonic() < end:
            body = {"prompt": "once upon a time", "max_tokens": dice.randint(2, 60), "stream": dice.random() < 0.8}
            pool.submit(client.post, f"{url}/v1/completions", json=body)
            time.sleep(dice.expovariate(_RATE))


def _trouble(engines, seconds):
    """One engine ends a stream early now and then; late in the picture another one answers 500 to everything."""
    for _ in range(4):
        engines["d1"].inject(SimulatedFault(FaultKind.END, after=2, times=1))
        time.sleep(seconds * 0.2)
    engines["p1"].inject(SimulatedFault(FaultKind.STATUS, status=503, times=2))
    engines["d2"].inject(SimulatedFault(FaultKind.STATUS, status=500))


def main(path, seconds):
    """Work, then take the pictures while the work goes on."""
    with cluster(2, 3, Settings(), prefill_s=0.08, token_s=0.015) as fleet, browser() as page:
        url = f"http://{fleet.router}"
        threads = [
            threading.Thread(target=_work, args=(url, seconds + 15)),
            threading.Thread(target=_trouble, args=(fleet.engines, seconds)),
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        for name, look in _LOOKS.items():
            page.look(height=860, **look)
            page.open(f"{url}/")
            page.until("document.querySelectorAll('#instances tr').length === 5")
            page.picture(path.with_stem(path.stem + name))
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 290.0)
