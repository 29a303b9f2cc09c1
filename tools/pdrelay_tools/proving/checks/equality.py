"""Texts and logprobs equal the reference's, for any length of the prompt and any cached part."""

from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question, Shape

_COUNT = 24


async def lengths(bench: Bench) -> CheckResult:
    """Ask prompts of every length and shape, and check that KV moved at all."""
    questions = bench.prompts.mixed(_COUNT, longest=bench.longest)
    before = await bench.loaded()
    findings = await bench.compare(questions)
    after = await bench.loaded()
    if before is None or after is None:
        return CheckResult(findings, ["The decode engines do not count the tokens that they load."])
    if after <= before:
        evidence = f"{len(questions)} prompts, and no token of them came from another engine"
        findings.append(Finding(FindingName.NOTHING_MOVED, evidence))
    return CheckResult(
        findings,
        [f"{after - before:.0f} tokens of {len(questions)} prompts came from prefill engines."],
    )


async def boundaries(bench: Bench) -> CheckResult:
    """Ask prompts that end just before, at and just after the end of a block."""
    size = bench.block_size
    prompt_lengths = {
        1,
        2,
        3,
        *(blocks * size + more for blocks in (1, 2, 3, 8) for more in (-1, 0, 1)),
    }
    questions = [
        Question(Shape.IDS, bench.prompts.ids(length))
        for length in sorted(prompt_lengths)
        if 0 < length <= bench.longest
    ]
    return CheckResult(await bench.compare(questions), [f"blocks of {size} tokens"])


async def prefix_hits(bench: Bench) -> CheckResult:
    """Ask prompts of which the decode engine has some blocks, all, or all and more."""
    size = bench.block_size
    first = bench.prompts.ids(3 * size + 4)
    questions = [Question(Shape.IDS, first)]
    questions += [
        Question(Shape.IDS, first[:shared] + bench.prompts.ids(len(first) - shared))
        for shared in (size - 1, size, size + 1, 2 * size, 3 * size)
    ]
    whole_blocks = bench.prompts.ids(3 * size + 1)  # all but the last token is in whole blocks
    questions += [
        Question(Shape.IDS, whole_blocks),
        Question(Shape.IDS, whole_blocks),
        Question(Shape.IDS, first),
    ]
    questions += [
        Question(Shape.IDS, first + bench.prompts.ids(size + 1)),
        Question(Shape.IDS, first[: 2 * size]),
    ]
    return CheckResult(await bench.compare(questions))


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
