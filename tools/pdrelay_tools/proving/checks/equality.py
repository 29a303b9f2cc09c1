"""Texts and logprobs equal the reference's, whatever the prompt's length is and whatever a cache
has of it.
"""

from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.check import Check, Seen
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question, Shape

_COUNT = 24


async def lengths(bench: Bench) -> Seen:
    """Ask prompts of every length and shape, and look whether KV moved at all."""
    asked = bench.prompts.mixed(_COUNT, longest=bench.longest)
    before = await bench.loaded()
    findings = await bench.compare(asked)
    after = await bench.loaded()
    if before is None or after is None:
        return Seen(findings, ["The decode engines do not count the tokens that they load."])
    if after <= before:
        seen = f"{len(asked)} prompts, and no token of them came from another engine"
        findings.append(Finding(FindingName.NOTHING_MOVED, seen))
    return Seen(
        findings,
        [f"{after - before:.0f} tokens of {len(asked)} prompts came from prefill engines."],
    )


async def boundaries(bench: Bench) -> Seen:
    """Ask prompts that end just before, at and just after the end of a block."""
    size = bench.block_size
    wanted = {1, 2, 3, *(blocks * size + more for blocks in (1, 2, 3, 8) for more in (-1, 0, 1))}
    asked = [
        Question(Shape.IDS, bench.prompts.ids(length))
        for length in sorted(wanted)
        if 0 < length <= bench.longest
    ]
    return Seen(await bench.compare(asked), [f"blocks of {size} tokens"])


async def prefix_hits(bench: Bench) -> Seen:
    """Ask prompts of which the decode engine has some blocks, all, or all and more."""
    size = bench.block_size
    first = bench.prompts.ids(3 * size + 4)
    asked = [Question(Shape.IDS, first)]
    asked += [
        Question(Shape.IDS, first[:shared] + bench.prompts.ids(len(first) - shared))
        for shared in (size - 1, size, size + 1, 2 * size, 3 * size)
    ]
    whole = bench.prompts.ids(3 * size + 1)  # all but the last token is in whole blocks
    asked += [Question(Shape.IDS, whole), Question(Shape.IDS, whole), Question(Shape.IDS, first)]
    asked += [
        Question(Shape.IDS, first + bench.prompts.ids(size + 1)),
        Question(Shape.IDS, first[: 2 * size]),
    ]
    return Seen(await bench.compare(asked))


CHECKS = (
    Check(
        "lengths",
        "equality",
        "prompts of every length, as text, tokens and chats, whole and streamed",
        lengths,
        30.0,
        needs_reference=True,
    ),
    Check(
        "boundaries",
        "equality",
        "prompts that end before, at and after the end of a block",
        boundaries,
        needs_reference=True,
    ),
    Check(
        "prefix-hits",
        "equality",
        "prompts of which an engine has some blocks already, or all",
        prefix_hits,
        needs_reference=True,
    ),
)
