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
import threading
import time
import uuid
from statistics import median

import numpy as np

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
OWN_DELAY = 0.001  # s between the holder's own calls


def new_agent(delay):
    """Return an agent as ``io/nixl.py`` makes it; below 0 it has no progress thread."""
    from nixl import _api

    from pdrelay_connector.io.nixl import make_agent

    if delay >= 0:
        return make_agent(str(uuid.uuid4()), progress_delay_us=delay)
    return _api.nixl_agent(
        str(uuid.uuid4()), _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    )


def hold(delay):
    """Own the memory that is read, and say what share of a core that costs when asked."""
    from pdrelay_connector.io.nixl import register

    memory = np.ones(MIB << 20, dtype=np.uint8)
    agent = new_agent(delay)
    metadata = register(agent, "DRAM", 0, [(memory.ctypes.data, memory.nbytes)])
    print(json.dumps({"said": (metadata.hex(), memory.ctypes.data)}), flush=True)
    is_over = threading.Event()
    progress = threading.Thread(target=_progress, args=(agent, is_over)) if delay < 0 else None
    if progress is not None:
        progress.start()
    for line in sys.stdin:
        began = time.monotonic()
        used = time.process_time()
        time.sleep(float(line))
        print(
            json.dumps({"said": (time.process_time() - used) / (time.monotonic() - began)}),
            flush=True,
        )
    is_over.set()
    if progress is not None:
        progress.join()


def _progress(agent, is_over):
    while not is_over.wait(OWN_DELAY):
        agent.get_new_notifs()


class Reader:
    """Reads the other process's memory."""

    def __init__(self, delays, ucx):
        from pdrelay_connector.io.nixl import register

        self.holder = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.connector.progress", "--hold", str(delays[0])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ucx},
        )  # fmt: skip
        self.memory, self.agent = np.zeros(MIB << 20, dtype=np.uint8), new_agent(delays[1])
        register(self.agent, "DRAM", 0, [(self.memory.ctypes.data, self.memory.nbytes)])
        self.other = np.ones_like(self.memory)
        metadata, self.there = self.heard()
        self.name = self.agent.add_remote_agent(bytes.fromhex(metadata)).decode()

    def close(self):
        self.holder.stdin.close()
        self.holder.wait(10)

    def heard(self):
        return json.loads(next(line for line in self.holder.stdout if line.startswith('{"said"')))[
            "said"
        ]

    def idle_cores(self, seconds):
        """Return the share of a core of the holder that nobody reads, and of this process."""
        self.holder.stdin.write(f"{seconds}\n")
        self.holder.stdin.flush()
        began = time.monotonic()
        used = time.process_time()
        theirs = self.heard()
        return theirs, (time.process_time() - used) / (time.monotonic() - began)

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
    reader = Reader(WAYS[way], TRANSPORTS[transport])
    took = {name: [] for name in SIZES}
    copied = []
    try:
        for number in range(rounds + 1):
            for name, size in SIZES.items():
                took[name].append(reader.read(*size))
            copied.append(reader.copy())
            if not number:
                took, copied = {name: [] for name in SIZES}, []  # the first connects
        assert reader.memory[: 8 << 10].all(), "not all bytes were read"
        theirs, ours = reader.idle_cores(idle)
    finally:
        reader.close()
    seconds = {name: median(each) for name, each in took.items()}
    rates = {
        "read": reader.memory.nbytes / seconds["long"],
        "copied": reader.memory.nbytes / median(copied),
    }
    print(json.dumps({"row": {"idle": (theirs, ours), "seconds": seconds, **rates}}), flush=True)


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
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.hold is not None:
        hold(args.hold)
        return
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
