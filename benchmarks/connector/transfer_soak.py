"""A great many transfers over real NIXL between two processes: does anything add up?

``make soak-transfers`` prints a table: resident memory, descriptors and threads of both processes
after each tenth. Reads and writes take turns, through ``io/nixl.py`` as engines use it, of one to
eight pieces at random places, over shared memory or TCP.
"""

import argparse
import os
import random
import time

import numpy as np

from benchmarks.connector.holder import Holder, own
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.core.ports import XferOutcome
from support.proc import held_by

SIZE, PIECE, MOST = 16 << 20, 4096, 8  # bytes of each memory and of a piece; pieces of a transfer
TENTHS = 10
MOST_S = 1200.0


class Mover:
    """Moves pieces between this process's memory and the other's."""

    def __init__(self, holder):
        from pdrelay_connector.io.nixl import NixlTransferAgent

        agent, self.memory, _ = own(SIZE)
        metadata, self.there = holder.described()
        region = Region(self.there, 1, 1, 1, SIZE, SIZE, SIZE, SIZE)
        self.agent = NixlTransferAgent(agent, "DRAM", 0)
        self.draw = random.Random(3)
        self.handle = self.agent.attach(RankInfo(0, 1, metadata, "DRAM", 0, (region,)))

    def move(self, number):
        places = self.draw.sample(range(SIZE // PIECE), self.draw.randrange(1, MOST + 1))
        spans = [
            (self.there + place * PIECE, self.memory.ctypes.data + place * PIECE, PIECE)
            for place in places
        ]
        (self.agent.read if number % 2 else self.agent.write)(
            self.handle, np.array(spans, dtype=np.int64)
        )
        while not (ended := self.agent.poll()):
            pass
        if ended[0].outcome is not XferOutcome.DONE:
            raise RuntimeError(f"transfer {number} failed: {ended[0].reason}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--tcp", action="store_true", help="not over shared memory")
    args = parser.parse_args(argv)
    os.environ |= {"UCX_NET_DEVICES": "lo", **({"UCX_TLS": "tcp"} if args.tcp else {})}
    with Holder(SIZE) as holder:
        mover = Mover(holder)
        began = time.monotonic()
        print(
            "| transfers | s | mover: MB | descriptors | threads | holder: MB | descriptors | "
            "threads |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for number in range(1, args.transfers + 1):
            mover.move(number)
            is_late = time.monotonic() - began > MOST_S
            if number % max(1, args.transfers // TENTHS) == 0 or number == 1000 or is_late:
                cells = [f"{time.monotonic() - began:.0f}"]
                for pid in (os.getpid(), holder.pid):
                    resident, descriptors, threads = held_by(pid)
                    cells += [f"{resident / 1e6:.0f}", str(descriptors), str(threads)]
                print(f"| {number:,} | {' | '.join(cells)} |", flush=True)
            if is_late:
                break


if __name__ == "__main__":
    main()
