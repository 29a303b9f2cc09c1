"""Pairs of engines whose ranks divide a context among them, each in another way."""

import dataclasses

from support import kinds_table
from support.cache_kinds import Shape


def one_head(size):
    return dataclasses.replace(kinds_table.full(size), num_kv_heads=1)


def window_of_drafts(size):
    return dataclasses.replace(kinds_table.window(size), num_kv_heads=1, dcp_sharded=False)


def indexed(size):
    return kinds_table.KINDS["indexer of sparse attention"].specs(size)


def latent(ranks, shards, interleave=4, size=4, **options):
    return Shape((kinds_table.latent(size),), ranks=ranks, shards=shards, interleave=interleave, **options)


def heads(ranks, shards, interleave=4, size=4, **options):
    """As many copies of each of two heads as there are ranks for it."""
    return Shape((one_head(size),), ranks=ranks, shards=shards, interleave=interleave, heads=2, **options)


EQUAL = {
    "latent vectors": latent(2, 2),
    "latent vectors, one token in turn": latent(2, 2, 1),
    "latent vectors, four ranks, half a block in turn": latent(4, 4, 2),
    "latent vectors, each part twice": latent(4, 2),
    "two heads, each divided": heads(4, 2),
    "two heads, one token in turn": heads(4, 2, 1),
    "smaller blocks of the kernel": latent(2, 2, 4, kernel=2),
    "drafts that look ahead": latent(2, 2, lookahead=3),
    "drafts that are not divided": Shape((kinds_table.latent(4), window_of_drafts(4)), ranks=2, shards=2, interleave=4),
    "an indexer of sparse attention": Shape(indexed(4), ranks=2, shards=2, interleave=4),
    "an indexer, one token in turn": Shape(indexed(4), ranks=2, shards=2),
    "a state": Shape((kinds_table.latent(4), kinds_table.state(4)), ranks=2, shards=2, interleave=4),
    "a state as long as a block": Shape((kinds_table.state(8), kinds_table.latent(4)), ranks=2, shards=2, interleave=4),
}
UNEQUAL = {
    "two parts to one": (latent(2, 2), latent(1, 1)),
    "one to two parts": (latent(1, 1), latent(2, 2)),
    "two ranks to two parts": (latent(2, 1), latent(2, 2)),
    "two parts to four": (latent(2, 2), latent(4, 4)),
    "four parts to two": (latent(4, 4), latent(2, 2)),
    "four parts to two, one token in turn": (latent(4, 4, 1), latent(2, 2, 1)),
    "two parts to one, one token in turn": (latent(2, 2, 1), latent(1, 1)),
    "two parts, each twice, to four": (latent(4, 2), latent(4, 4)),
    "larger blocks on D": (latent(2, 2, 4), latent(2, 2, 4, 8)),
    "smaller blocks on D": (latent(2, 2, 2, 8), latent(4, 4, 2, 4)),
    "an indexer, two parts to one": (
        Shape(indexed(4), ranks=2, shards=2, interleave=4),
        Shape(indexed(4)),
    ),
    "an indexer, two parts to four": (
        Shape(indexed(4), ranks=2, shards=2, interleave=4),
        Shape(indexed(4), ranks=4, shards=4, interleave=4),
    ),
    "two heads, divided on P": (heads(4, 2), heads(2, 1)),
    "two heads, divided on D": (heads(2, 1), heads(8, 4)),
}
# P computes a prompt in two contexts (PCP), which keep the same of it, or divide it.
CONTEXTS = {
    "two contexts to one rank": (latent(1, 1, contexts=2), latent(1, 1)),
    "two contexts of two ranks to two ranks": (heads(2, 1, contexts=2), heads(2, 1)),
    "two contexts to two parts": (latent(1, 1, contexts=2), latent(2, 2)),
    "two contexts that divide a prompt, to two parts": (latent(2, 2, contexts=2), latent(2, 2)),
    "four contexts that divide a prompt, to two parts": (latent(4, 4, contexts=4), latent(2, 2)),
    "two contexts that divide a prompt, to one rank": (latent(2, 2, contexts=2), latent(1, 1)),
}
PAIRS = {name: (shape, shape) for name, shape in EQUAL.items()} | UNEQUAL | CONTEXTS
