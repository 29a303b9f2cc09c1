"""Many requests at once: right answers all the same."""

from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.check import Check, Seen
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import Reply

_BURST = 24
_SIBLINGS = 16


async def burst(bench: Bench) -> Seen:
    """Send many different prompts at once."""
    asked = bench.prompts.mixed(_BURST, longest=min(400, bench.longest))
    return Seen(await bench.compare(asked, at_once=_BURST))


async def siblings(bench: Bench) -> Seen:
    """Send many prompts at once that begin with the same new blocks: some find them while others
    compute them.
    """
    shared = bench.prompts.ids(4 * bench.block_size)
    asked = [
        Question(Shape.IDS, shared + bench.prompts.ids(5 + 7 * number))
        for number in range(_SIBLINGS)
    ]
    return Seen(await bench.compare(asked, at_once=_SIBLINGS))


async def waves(bench: Bench) -> Seen:
    """Send bursts one after the other, each as soon as the last one has been answered."""
    asked: list[Question] = []
    replies: list[Reply] = []
    for _ in range(4):
        wave = [
            Question(Shape.IDS, bench.prompts.ids(20 + 17 * number), stream=True)
            for number in range(10)
        ]
        replies += await bench.ask_all(wave, at_once=len(wave))
        asked += wave
    return Seen(await bench.judge(asked, replies))


CHECKS = (
    Check("burst", "many", "many different prompts at once", burst, 30.0),
    Check("siblings", "many", "many prompts at once that begin alike", siblings),
    Check("waves", "many", "bursts that follow each other", waves, 30.0),
)
