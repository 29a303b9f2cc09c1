"""How long NIXL takes until a transfer of many descriptors is on its way, by how the descriptors
are given to it.

``python -m benchmarks.connector.posting`` prints a table: two agents in two processes, scattered
blocks that nothing merges. ``list`` is what the connector does: all descriptors with each transfer.
``prepared`` has a cache's descriptors prepared once, and gives indices; ``strided`` prepares them
from one row (NIXL's Nx5 lists) in place of one for each.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
import uuid
from statistics import median

import numpy as np

WAYS = ("list", "prepared", "strided")


def new_agent():
    from pdrelay_connector.io.nixl import make_agent

    return make_agent(str(uuid.uuid4()), progress_delay_us=1000)


def hold(size):
    """Own the memory that is read."""
    from pdrelay_connector.io.nixl import register

    memory = np.ones(size, dtype=np.uint8)
    agent = new_agent()
    metadata = register(agent, "DRAM", 0, [(memory.ctypes.data, size)])
    print(json.dumps({"metadata": metadata.hex(), "address": memory.ctypes.data}), flush=True)
    sys.stdin.read()


class Reader:
    """Reads blocks of the other process's memory, in random order, in one of the three ways."""

    def __init__(self, blocks, size):
        from pdrelay_connector.io.nixl import register

        self.blocks, self.size = blocks, size
        self.holder = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.connector.posting", "--hold", str(blocks * size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.memory, self.agent = np.zeros(blocks * size, dtype=np.uint8), new_agent()
        register(self.agent, "DRAM", 0, [(self.memory.ctypes.data, self.memory.nbytes)])
        theirs = json.loads(
            next(line for line in self.holder.stdout if line.startswith('{"metadata"'))
        )
        self.there = theirs["address"]
        self.here = self.memory.ctypes.data
        self.name = self.agent.add_remote_agent(bytes.fromhex(theirs["metadata"])).decode()
        self.prepared = {}
        self.seconds_to_prepare = {}

    def close(self):
        self.holder.stdin.close()
        self.holder.wait(10)

    def prepare(self, way):
        """Prepare the descriptors of both caches, once."""
        start = time.perf_counter()
        self.prepared[way] = [
            self.agent.prep_xfer_dlist(name, self._described(base, way), "DRAM")
            for name, base in (("NIXL_INIT_AGENT", self.here), (self.name, self.there))
        ]
        self.seconds_to_prepare[way] = time.perf_counter() - start

    def _described(self, base, way):
        if way == "strided":
            return np.array([[base, self.size, 0, self.size, self.blocks]], dtype=np.uint64)
        return self._rows(base, np.arange(self.blocks))

    def _rows(self, base, order):
        rows = np.empty((len(order), 3), dtype=np.uint64)
        rows[:, 0] = base + order * self.size
        rows[:, 1] = self.size
        rows[:, 2] = 0
        return rows

    def post(self, way, there, here):
        """Return the seconds until NIXL has a handle, those of the call that starts the transfer,
        and of all of it.
        """
        start = time.perf_counter()
        if way == "list":
            ours, theirs = (
                self.agent.get_xfer_descs(self._rows(base, order), "DRAM")
                for base, order in ((self.here, here), (self.there, there))
            )
            xfer = self.agent.initialize_xfer("READ", ours, theirs, self.name)
        else:
            ours, theirs = self.prepared[way]
            indices = (order.astype(np.int32) for order in (here, there))
            xfer = self.agent.make_prepped_xfer("READ", ours, next(indices), theirs, next(indices))
        made = time.perf_counter()
        state = self.agent.transfer(xfer)
        posted = time.perf_counter()
        while state != "DONE":
            state = self.agent.check_xfer_state(xfer)
            if state == "ERR":
                raise RuntimeError(f"a READ of {len(there)} descriptors failed")
        over = time.perf_counter()
        xfer.release()
        return made - start, posted - made, over - start


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--descriptors", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=4096, help="of one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.hold:
        hold(args.hold)
        return
    reader = Reader(args.descriptors, args.bytes)
    draw = np.random.default_rng(17)
    times = {way: [] for way in WAYS}
    try:
        for way in WAYS[1:]:
            reader.prepare(way)
        for _, way in itertools.product(range(args.rounds + 1), WAYS):
            there, here = (draw.permutation(args.descriptors).astype(np.int64) for _ in range(2))
            times[way].append(reader.post(way, there, here))
        assert reader.memory.all(), "not all bytes were read"
    finally:
        reader.close()
    print(
        f"{'way':<10} {'prepared once':>14} {'handle':>10} {'start':>10} {'whole':>10}   ms, "
        f"medians"
    )
    for way, rounds in times.items():
        # the first connects
        handle, start, whole = (median(column) * 1e3 for column in zip(*rounds[1:], strict=True))
        once = reader.seconds_to_prepare.get(way, 0.0) * 1e3
        print(f"{way:<10} {once:>14.2f} {handle:>10.2f} {start:>10.2f} {whole:>10.2f}")


if __name__ == "__main__":
    main()
