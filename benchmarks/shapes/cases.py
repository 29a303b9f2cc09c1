"""What is moved: the KV of a prompt of a model of about 8 billion parameters, between engines of
several shapes.
"""

import random
from typing import NamedTuple

from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import RankInfo, Region

# bytes: K and V of one token and head of 128, in bfloat16
LAYERS = 28
HEADS = 8
WIDTH = 2 * 128 * 2
TOKEN = LAYERS * HEADS * WIDTH  # bytes
LENGTHS = (1024, 4096)  # tokens of a prompt
ROOM = LENGTHS[-1] * 5 // 4  # tokens that an engine has room for
MEMORY = ROOM * TOKEN  # bytes


class Side(NamedTuple):
    """The shape of one engine."""

    layout: str = "LBHNC"
    block_size: int = 16  # tokens
    ranks: int = 1  # tensor parallel

    def info(self, base, rank):
        """Return what one of its ranks says of memory at ``base``, which all of them share out."""
        sizes = {
            "L": LAYERS,
            "B": ROOM // self.block_size,
            "H": HEADS // self.ranks,
            "N": self.block_size,
            "C": WIDTH,
        }
        strides = {}
        step = 1
        for axis in reversed(self.layout):
            strides[axis] = step
            step *= sizes[axis]
        regions = tuple(
            Region(
                base=base + rank * step + layer * strides["L"],
                count=sizes["B"],
                heads=sizes["H"],
                tokens=self.block_size,
                width=WIDTH,
                row_stride=strides["B"],
                head_stride=strides["H"],
                token_stride=strides["N"],
                all_heads=HEADS,
            )
            for layer in range(LAYERS)
        )
        return RankInfo(rank, self.ranks, b"", "DRAM", 0, regions)

    def blocks(self, tokens, choose):
        """Return the blocks of a prompt: one after the other, unless they are chosen at random."""
        count = tokens // self.block_size
        all_ = range(1, ROOM // self.block_size)
        return choose.sample(all_, count) if choose else list(all_[:count])


class Case(NamedTuple):
    """Two engines of certain shapes."""

    theirs: Side = Side()
    ours: Side = Side()
    is_random: bool = True  # blocks are where there was room for them
    every: int = 1  # it is measured in the first of so many rounds

    def token_range(self, tokens):
        """Return a whole prompt, always in the same blocks."""
        choose = random.Random(tokens) if self.is_random else None
        return TokenRange(
            0, 0, tokens, self.theirs.blocks(tokens, choose), self.ours.blocks(tokens, choose)
        )


CASES = {
    "twins, contiguous blocks": Case(is_random=False),
    "twins": Case(),
    "twins, layers within blocks (BLHNC)": Case(Side("BLHNC"), Side("BLHNC")),
    "block size 16 to 32": Case(ours=Side(block_size=32)),
    "TP 2 to 1": Case(theirs=Side(ranks=2)),
    "TP 1 to 2": Case(ours=Side(ranks=2)),
    "head-major to token-major (LBHNC to LBNHC)": Case(ours=Side("LBNHC"), every=3),
}
