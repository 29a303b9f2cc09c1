"""One of two processes with memory and NIXL: ``python -m benchmarks.shapes.side READS``.

The one that does not read (READS is 0) tells where its memory is and what NIXL says of it, and then
only waits. The other is told that, and then what to move, in one JSON object a line; it answers
each with one.
"""

import os
import sys
import time

import msgspec
import numpy as np

from benchmarks.shapes.cases import CASES, MEMORY, TOKEN
from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.source_ranks import needed_ranks
from pdrelay_connector.core.layout.transfer_plan import pull_route
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.ports import XferOutcome
from pdrelay_connector.io.nixl import NixlTransferAgent, make_agent, register

RANKS = 2  # agents of a process: it plays all ranks of its engine
PAUSE = 0.0002  # s between two looks at what is in flight
CHECKED = 1000  # runs of each transfer whose bytes are compared


def content():
    """Return the same bytes in every process."""
    return np.random.default_rng(1).integers(0, 1 << 63, MEMORY // 8, dtype=np.int64).view(np.uint8)


class Memory:
    """Memory that every agent of this process has registered."""

    def __init__(self, name, memory):
        self.bytes = memory
        self.base = memory.ctypes.data
        self.agents = [
            make_agent(f"{name}-{rank}", progress_delay_us=1000) for rank in range(RANKS)
        ]
        self.metadata = [
            register(agent, "DRAM", 0, [(self.base, memory.nbytes)]) for agent in self.agents
        ]


class Reader:
    """Moves the KV of prompts from the other process's memory into its own, as a decode engine
    does.
    """

    def __init__(self, base, metadata):
        self.source = content()  # what the other process has
        self.memory = Memory("reader", np.zeros(MEMORY, dtype=np.uint8))
        self.base = base
        self.movers = [NixlTransferAgent(agent, "DRAM", 0) for agent in self.memory.agents]
        peers = [RankInfo(0, 1, each, "DRAM", 0, ()) for each in metadata]
        self.handles = [[mover.attach(peer) for peer in peers] for mover in self.movers]
        self.prepared = {}

    def copy(self, tokens):
        """Copy as many bytes within this process."""
        size = tokens * TOKEN
        start = time.monotonic()
        np.copyto(self.memory.bytes[:size], self.source[:size])
        return {"seconds": time.monotonic() - start}

    def move(self, case, tokens):
        """Plan a transfer and carry it out."""
        start = time.monotonic()
        plan = [
            (*where, route.spans([token_range]))
            for *where, route, token_range in self.routes(case, tokens)
        ]
        planning = time.monotonic() - start
        return {"planning": planning, **self.carry_out(plan)}

    def move_unmerged(self, case, tokens):
        """Carry out the same transfer with a descriptor for each block and layer, or more if need
        be.
        """
        key = "unmerged", case, tokens
        if key not in self.prepared:
            self.prepared[key] = self.unmerged(case, tokens)
        return self.carry_out(self.prepared[key])

    def check(self, case, tokens):
        """Move once and compare; also what the first transfer between two agents costs more is paid
        here.
        """
        self.memory.bytes[:] = 0
        plan = [
            (*where, route.spans([token_range]))
            for *where, route, token_range in self.routes(case, tokens)
        ]
        moved = self.carry_out(plan)
        assert moved["bytes"] == tokens * TOKEN, moved
        for *_, spans in plan:
            for there, here, size in spans[:: max(1, len(spans) // CHECKED)].tolist():
                source, target = there - self.base, here - self.memory.base
                assert (
                    self.memory.bytes[target : target + size] == self.source[source : source + size]
                ).all(), case
        unmerged = sum(len(spans) for *_, spans in self.unmerged(case, tokens))
        return {"can_merge": unmerged > moved["descriptors"]}

    def routes(self, case, tokens):
        """Return our rank, their rank, the route between them and the stretch to move; engines
        build routes once.
        """
        key = "routes", case, tokens
        if key not in self.prepared:
            token_range = CASES[case].token_range(tokens)
            self.prepared[key] = [
                (our.rank, their.rank, pull_route(our, their), token_range)
                for our, their in self.pairs(CASES[case])
            ]
        return self.prepared[key]

    def pairs(self, case):
        for rank in range(case.ours.ranks):
            our = case.ours.info(self.memory.base, rank)
            for their in needed_ranks(
                our, [case.theirs.info(self.base, peer) for peer in range(case.theirs.ranks)]
            ):
                check_shapes(our, their)
                yield our, their

    def unmerged(self, case, tokens):
        """Plan block by block for the first layer; the others are the same elsewhere."""
        plan = []
        for our, their in self.pairs(CASES[case]):
            first = pull_route(
                *(msgspec.structs.replace(info, regions=info.regions[:1]) for info in (our, their))
            )
            layer = np.concatenate(
                [first.spans([one]) for one in single_blocks(CASES[case], tokens)]
            )
            bases = np.array(
                [(t.base, o.base, 0) for t, o in zip(their.regions, our.regions, strict=True)]
            )
            spans = ((bases - bases[0])[:, None] + layer).reshape(-1, 3)
            plan.append((our.rank, their.rank, spans))
        return plan

    def carry_out(self, plan):
        """Post every read of a plan, and wait until all have ended."""
        start = time.monotonic()
        ended = []
        for rank, peer, spans in plan:
            self.movers[rank].read(self.handles[rank][peer], spans)
        while len(ended) < len(plan):
            ended += [one for mover in self.movers for one in mover.poll()]
            if len(ended) < len(plan):
                time.sleep(PAUSE)
        seconds = time.monotonic() - start
        assert all(one.outcome is XferOutcome.DONE for one in ended), ended
        return {
            "bytes": sum(one.bytes for one in ended),
            "descriptors": sum(one.descriptors for one in ended),
            "posting": sum(one.posting for one in ended),
            "seconds": seconds,
        }


def single_blocks(case, tokens):
    """Cut a prompt into the smaller blocks of both sides."""
    sizes = {"remote_size": case.theirs.block_size, "local_size": case.ours.block_size}
    size = min(sizes.values())
    for start in range(0, tokens, size):
        yield case.token_range(tokens).part(start, start + size, **sizes)


def main(reads):
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # NIXL writes its log to stdout

    def say(**said):
        out.write(msgspec.json.encode(said) + b"\n")

    if not int(reads):
        memory = Memory("source", content())
        say(base=memory.base, metadata=memory.metadata)
        sys.stdin.read()
        return
    where = msgspec.json.decode(sys.stdin.buffer.readline(), type=Where)
    reader = Reader(where.base, where.metadata)
    say()
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line)
        say(**getattr(reader, order.pop("do"))(**order))


class Where(msgspec.Struct):
    base: int
    metadata: list[bytes]


if __name__ == "__main__":
    main(*sys.argv[1:])
