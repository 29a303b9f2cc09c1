"""The transports that UCX really uses, from the tables that ``UCX_PROTO_INFO=y`` logs (UCX 1.23).

A table has the connection and the operation above, and a row for each range of sizes::

    | 6e09b956-e22c-4290-af7e-501db90 intra-node cfg#1         |
    | remote memory write by ucp_put* from host memory to host |
    +--------+-------------+-----------------------------------+
    | Range  | Description |              Config               |
    +--------+-------------+-----------------------------------+
    | 0..inf | zero-copy   | cma/memory                        |
    +--------+-------------+-----------------------------------+
"""

import re
from collections.abc import Iterable
from typing import Final

MOST: Final = 16  # transports that are named
# not "self": that is no way to another process
_PEER: Final = re.compile(r"\| .*(?:intra|inter)-node cfg#\d+ *\|")
_OPERATION: Final = re.compile(r"\| remote memory (read|write) by ucp_")
_ROW: Final = re.compile(r"\|[^|]*\|[^|]*\|([^|]*)\|")
_TRANSPORT: Final = re.compile(r"[a-z][a-z0-9_]*/[\w:.-]+")


def transports_in(log: str) -> tuple[str, ...]:
    """Return operations on a peer's memory with transport and device, as ``WRITE tcp/eth0``."""
    uses: dict[str, None] = {}  # in their order
    is_peer = False
    operation = ""
    for line in log.splitlines():
        if _ROW.search(line) is None and "|" in line:  # one cell: above a table
            if (match := _OPERATION.search(line)) is not None:
                operation = match[1].upper() if is_peer else ""
            else:
                is_peer = _PEER.search(line) is not None
                operation = ""
        elif operation and (row := _ROW.search(line)) is not None:
            uses.update(
                dict.fromkeys(
                    f"{operation} {transport}" for transport in _TRANSPORT.findall(row[1])
                )
            )
    return tuple(uses)[:MOST]


def is_over_tcp(used: Iterable[str]) -> bool:
    """Whether an operation uses TCP."""
    return any(use.rpartition(" ")[2].startswith("tcp/") for use in used)
