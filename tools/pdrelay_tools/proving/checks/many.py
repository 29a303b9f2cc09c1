"""Right answers to many requests at once."""

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.core.question import Question, Shape

_BURST = 24
_SIBLINGS = 16


async def burst(bench: Bench) -> CheckResult:
    """Send many different prompts at once."""
    questions = bench.prompts.mixed(_BURST, longest=min(400, bench.longest))
    return CheckResult(await bench.compare(questions, most=_BURST))


async def siblings(bench: Bench) -> CheckResult:
    """Send many prompts at once with the same new prefix: some hit it while others compute it."""
    shared = bench.prompts.ids(4 * bench.block_size)
    questions = [
        Question(Shape.IDS, shared + bench.prompts.ids(5 + 7 * number))
        for number in range(_SIBLINGS)
    ]
    return CheckResult(await bench.compare(questions, most=_SIBLINGS))


async def waves(bench: Bench) -> CheckResult:
    """Send bursts, each as soon as the one before is answered."""
    questions: list[Question] = []
    replies: list[Reply] = []
    for _ in range(4):
        wave = [
            Question(Shape.IDS, bench.prompts.ids(20 + 17 * number), stream=True)
            for number in range(10)
        ]
        replies += await bench.ask_all(wave, most=len(wave))
        questions += wave
    return CheckResult(await bench.judge(questions, replies))


CHECKS = (
    Check("burst", "many", "many different prompts at once", burst, 30.0),
    Check("siblings", "many", "many prompts at once that begin alike", siblings),
    Check("waves", "many", "bursts that follow each other", waves, 30.0),
)
