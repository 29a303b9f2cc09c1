"""NIXL with its progress thread, at several delays, and without: what it costs while idle, and what
reads take.

``python -m benchmarks.connector.progress`` prints a table: two processes, one of which reads the
other's memory, over shared memory and over TCP. The reader polls as often as the connector does
(``POLL_INTERVAL``). Without NIXL's thread each side must call NIXL itself: the reader does with its
polls, the holder in a loop of 1 ms.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from statistics import median

import numpy as np

from benchmarks.connector.holder import Holder, own
from pdrelay_connector.core.transfer.transfers import POLL_INTERVAL

# Microseconds between two polls of NIXL's thread, at the holder and at the reader; below 0 there is
# none.
WAYS = {
    "thread, 1,000 us": (1000, 1000),
    "thread, 100 us": (100, 100),
    "thread, 10,000 us": (10000, 10000),
    "none at the reader": (1000, -1),
    "none": (-1, -1),
}
DEFAULT = "thread, 1,000 us"
TRANSPORTS = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp"}}
# descriptors, bytes of each
SIZES = {"one block": (1, 8 << 10), "a prompt": (94, 28 << 10), "long": (4096, 16 << 10)}
MIB = 64


class Reader:
    """Reads the other process's memory."""

    def __init__(self, holder, delay_us):
        self.agent, self.memory, _ = own(MIB << 20, delay_us)
        self.memory[:] = 0
        self.other = np.ones_like(self.memory)
        metadata, self.there = holder.described()
        self.name = self.agent.add_remote_agent(metadata).decode()

    def copy(self):
        """Return the seconds in which this process copies as many bytes as the longest read
        moves.
        """
        began = time.monotonic()
        np.copyto(self.other, self.memory)
        return time.monotonic() - began

    def read(self, count, size):
        """Return the seconds of a read."""
        at = np.arange(count) * size
        rows = [np.stack((base + at, np.full_like(at, size), 0 * at), axis=1).astype(np.uint64)
                for base in (self.memory.ctypes.data, self.there)]  # fmt: skip
        began = time.monotonic()
        ours, theirs = (self.agent.get_xfer_descs(each, "DRAM") for each in rows)
        xfer = self.agent.initialize_xfer("READ", ours, theirs, self.name)
        state = self.agent.transfer(xfer)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("a read failed")
            time.sleep(POLL_INTERVAL)
            state = self.agent.check_xfer_state(xfer)
        seconds = time.monotonic() - began
        xfer.release()
        return seconds


def measure(way, transport, rounds, idle):
    """Print a row; run in a process of its own, for UCX reads its environment once."""
    theirs_us, ours_us = WAYS[way]
    took = {name: [] for name in SIZES}
    copied = []
    with Holder(MIB << 20, theirs_us, **TRANSPORTS[transport]) as holder:
        reader = Reader(holder, ours_us)
        for number in range(rounds + 1):
            for name, size in SIZES.items():
                took[name].append(reader.read(*size))
            copied.append(reader.copy())
            if not number:
                took, copied = {name: [] for name in SIZES}, []  # the first connects
        assert reader.memory[: 8 << 10].all(), "not all bytes were read"
        cores = holder.idle_cores(idle)
    seconds = {name: median(each) for name, each in took.items()}
    rates = {
        "read": reader.memory.nbytes / seconds["long"],
        "copied": reader.memory.nbytes / median(copied),
    }
    print(json.dumps({"row": {"idle": cores, "seconds": seconds, **rates}}), flush=True)


def measured(way, transport, *, rounds=40, idle=3.0):
    """Return what :func:`measure` prints."""
    argv = [sys.executable, "-m", "benchmarks.connector.progress", "--measure", way, transport]
    argv += ["--rounds", str(rounds), "--idle", str(idle)]
    environment = {**os.environ, "UCX_NET_DEVICES": "lo", **TRANSPORTS[transport]}
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"row"')))[
        "row"
    ]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--idle", type=float, default=3.0, help="s")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        measure(*args.measure, args.rounds, args.idle)
        return
    print(
        "| transport | NIXL | idle holder, cores | idle reader | one block, ms | 1,500 tokens, ms "
        "| GB/s | of memcpy |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for transport, way in itertools.product(TRANSPORTS, WAYS):
        row = measured(way, transport, rounds=args.rounds, idle=args.idle)
        ms = " | ".join(f"{row['seconds'][name] * 1e3:.2f}" for name in ("one block", "a prompt"))
        cores = " | ".join(f"{each:.3f}" for each in row["idle"])
        rate = f"{row['read'] / 1e9:.2f} | {row['read'] / row['copied']:.2f}"
        print(f"| {transport} | {way} | {cores} | {ms} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
