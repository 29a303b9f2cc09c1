"""How long NIXL takes until a transfer of many descriptors is on its way, by how the descriptors
are given to it.

``python -m benchmarks.connector.posting`` prints a table: two agents in two processes, scattered
blocks that nothing merges. ``list`` is what the connector does: all descriptors with each transfer.
``prepared`` has a cache's descriptors prepared once, and gives indices; ``strided`` prepares them
from one row (NIXL's Nx5 lists) in place of one for each.
"""

import argparse
import itertools
import time
from statistics import median

import numpy as np

from benchmarks.connector.holder import Holder, own

WAYS = ("list", "prepared", "strided")


class Reader:
    """Reads blocks of the other process's memory, in random order, in one of the three ways."""

    def __init__(self, holder, blocks, size):
        self.blocks, self.size = blocks, size
        self.agent, self.memory, _ = own(blocks * size)
        self.memory[:] = 0
        self.here = self.memory.ctypes.data
        metadata, self.there = holder.described()
        self.name = self.agent.add_remote_agent(metadata).decode()
        self.prepared = {}
        self.seconds_to_prepare = {}

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
    args = parser.parse_args(argv)
    draw = np.random.default_rng(17)
    times = {way: [] for way in WAYS}
    with Holder(args.descriptors * args.bytes) as holder:
        reader = Reader(holder, args.descriptors, args.bytes)
        for way in WAYS[1:]:
            reader.prepare(way)
        for _, way in itertools.product(range(args.rounds + 1), WAYS):
            there, here = (draw.permutation(args.descriptors).astype(np.int64) for _ in range(2))
            times[way].append(reader.post(way, there, here))
        assert reader.memory.all(), "not all bytes were read"
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
