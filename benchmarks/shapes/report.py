"""A part of docs/benchmarks/connector.md, from the raw numbers."""

import statistics

from benchmarks import page
from benchmarks.page import paragraph, table
from benchmarks.shapes.cases import HEADS, LAYERS, LENGTHS, TOKEN, WIDTH

HEADINGS = (
    "engines",
    "descriptors",
    "planning, ms",
    "posting, ms",
    "whole transfer, ms",
    "GB/s",
    "of memcpy",
    "unmerged: descriptors",
    "unmerged: GB/s",
)


def parts(seen):
    """Return the parts of the page."""
    return [_head(seen), *(_section(seen, way) for way in seen["moves"])]


def _head(seen):
    lengths, sizes = (
        " and ".join(each)
        for each in zip(*((f"{n:,}", f"{n * TOKEN >> 20} MiB") for n in LENGTHS), strict=True)
    )
    about = paragraph("""
`make bench-shapes` measures everything in a few minutes and writes this page; with `QUICK=1` it moves less and less
often, to see whether all of it works, and writes to `.pdrelay/bench`. The raw numbers are in `shapes.json`.""")
    setting = paragraph(f"""
Two processes on this machine, one with the memory that is read and one that reads, planned with
`core/layout/transfer_plan.py` and posted with
`io/nixl.py` as engines do, without vLLM. The model has {LAYERS} layers and {HEADS} KV heads of 128 in bfloat16:
{TOKEN >> 10} KiB a token, so prompts of {lengths} tokens are {sizes}. Blocks have 16 tokens in the layout LBHNC
(layer, block, head, token, content) unless said otherwise, and are scattered unless said to be contiguous. Each number
is the median of {seen["rounds"]} rounds, in each of which everything is measured once; the last row in every third.""")
    words = paragraph(f"""
**Planning** turns block lists into runs of bytes; **posting** is NIXL's preparing and starting of the transfer on the
calling thread, which for shared memory is most of the copying, too. The **whole transfer** is both and the wait until
the reader knows that all bytes are there, and GB/s is over all of it. With tensor parallelism (TP), one thread posts
the reads of all ranks, one after the other. **Unmerged** is the same without planning, a descriptor for every layer of
every block; "same" where no two of them touch on both sides, or where shapes differ so that blocks are in several
pieces anyway. The pieces of the last row have {WIDTH} bytes, K and V of one token and head. **memcpy** is
`numpy.copyto` of as many contiguous bytes by one thread of the reader, in the same rounds.""")
    measured = page.setting({"": seen["about"]})
    return f"# Engines of unequal shapes\n\n{about}\n{measured}\n{setting}\n{words}"


def _section(seen, way):
    tables = [_length(seen, way, length) for length in sorted(seen["moves"][way], key=int)]
    return "\n".join([f"## {way}\n", *tables])


def _length(seen, way, length):
    copied = int(length) * TOKEN / statistics.median(seen["copies"][way][length]) / 1e9
    rows = [_row(name, found, copied) for name, found in seen["moves"][way][length].items()]
    return f"{int(length):,} tokens; memcpy: {copied:.2f} GB/s.\n\n{table(HEADINGS, rows)}"


def _row(name, found, copied):
    planning, posting, seconds = (
        _median(found["merged"], key) for key in ("planning", "posting", "seconds")
    )
    rate = _rate(found["merged"])
    bare = found["unmerged"]
    other = (f"{bare[0]['descriptors']:,}", f"{_rate(bare):.2f}") if bare else ("same", "same")
    times = (f"{each * 1e3:.1f}" for each in (planning, posting, planning + seconds))
    return (
        name,
        f"{found['merged'][0]['descriptors']:,}",
        *times,
        f"{rate:.2f}",
        f"{rate / copied:.2f}",
        *other,
    )


def _rate(moves):
    return (
        statistics.median(m["bytes"] / (m.get("planning", 0.0) + m["seconds"]) for m in moves) / 1e9
    )


def _median(moves, key):
    return statistics.median(move[key] for move in moves)
