"""Measures the bytes of KV that one request moved, by the counters of its two engines."""

import argparse
import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from pdrelay_proxy.console.router_client import CommandFailed, RouterClient
from pdrelay_proxy.errors import ConfigError
from pdrelay_tools.http_server import HttpServer, open_transport
from pdrelay_tools.served_by import metric_total

_FINISHED: Final = (b"vllm:request_success_total",)
_TIMEOUT_S: Final = 2.0  # for the answers of all engines
_WAIT_S: Final = 3.0  # an engine publishes what it counts a moment after its answer
_POLL_S: Final = 0.1
_MOST_ENGINES: Final = 32  # whose metrics are read before each question

_Counts = tuple[int, int]  # bytes moved, and requests that ended


class KvMeter:
    """Finds the engines with the router's key for operators, and reads their metrics."""

    def __init__(self, url: str) -> None:
        """Read the engines' addresses from the router; ``why_not``: why they are not known."""
        self.why_not: str | None = None
        self._addresses: Mapping[str, str] = {}
        try:
            with RouterClient(_access(url)) as router:
                rows = router.request("/instances")["instances"]
            self._addresses = {row["id"]: row["address"] for row in rows}
            if len(rows) > _MOST_ENGINES:
                self.why_not = f"there are {len(rows)} engines, too many to ask"
        except ConfigError:
            self.why_not = "without the admin key"
        except CommandFailed:
            self.why_not = "the router does not say where its engines are"
        except (LookupError, TypeError):
            self.why_not = "the router answers something else than a router does"
        self._before: Mapping[str, _Counts] = {}

    def start(self) -> None:
        """Read the counters of all engines: any of them may serve the request."""
        if self.why_not is None:
            self._before = self._read(self._addresses)

    def moved(self, names: Collection[str], sleep: Callable[[float], None] = time.sleep) -> str:
        """Return in words how much the engines that served a request moved since ``start``.

        Waits until they count the request as finished, for at most _WAIT_S.
        """
        if self.why_not is not None:
            return f"unknown ({self.why_not})"
        before = {name: self._before[name] for name in names if name in self._before}
        if not before or len(before) < len(names):
            return "unknown (the engines have no metric for it, or cannot be reached from here)"
        until = time.monotonic() + _WAIT_S
        while True:
            now = self._read(before)
            if len(now) < len(before):
                return "unknown (an engine cannot be reached from here)"
            requests = [now[name][1] - count for name, (_, count) in before.items()]
            if min(requests) > 0 or time.monotonic() >= until:
                break
            sleep(_POLL_S)
        size = sum(now[name][0] - count for name, (count, _) in before.items())
        if min(requests) == 0:
            return f"{size:,} bytes so far"
        return f"{size:,} bytes" + (
            ", those of other requests included" if max(requests) > 1 else ""
        )

    def _read(self, names: Collection[str]) -> Mapping[str, _Counts]:
        return asyncio.run(self._read_all(names))

    async def _read_all(self, names: Collection[str]) -> Mapping[str, _Counts]:
        async with open_transport(None) as transport:
            servers = [
                HttpServer(name, f"http://{self._addresses[name]}", transport) for name in names
            ]
            replies = await asyncio.gather(
                *(server.get("/metrics", timeout_s=_TIMEOUT_S) for server in servers)
            )
        counts = dict[str, _Counts]()
        for name, reply in zip(names, replies, strict=True):
            moved = metric_total(reply.body)
            finished = metric_total(reply.body, _FINISHED)
            if not reply.failure() and moved is not None and finished is not None:
                counts[name] = (moved, finished)
        return counts


def _access(url: str) -> argparse.Namespace:
    """Return the flags of an operators' command of which only the router's URL is given."""
    nothing = dict.fromkeys(("key_file", "ca", "pin", "server_name", "client_cert", "client_key"))
    return argparse.Namespace(router=url, timeout=_TIMEOUT_S, **nothing)
