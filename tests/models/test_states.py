"""Models that keep a state: pulled and pushed, text and logprobs are those of a single engine, and the state moved.

``PDRELAY_WRITE_MODELS=1`` has the run write the table of docs/models.md.
"""

import os

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.architectures import ARCHITECTURES, make, size_of
from support.legs import plain
from support.questions import ids
from support.shapes import random_questions
from support.tables import write_cell
from support.trios import TOLERANCE, Trio

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# What make test-all runs: one architecture without prefix caching and one with it, each in one mode. What a state is,
# the layout of the cache says, which has no mode.
QUICK, QUICK_CACHING = "granitemoehybrid", "lfm2"
QUICK_MODES = {"trio": TransferMode.PUSH, "caching": TransferMode.PULL}
LENGTHS = (1, 2, 3, 31, 32, 33, 64, 65, 96, 97, 128, 129, 255, 256, 257, 258, 300, 400, 512, 513, 700, 1023, 1500, 1900)


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: all architectures but two, their other mode, and long tests."""
    is_quick = params.get("trio", QUICK) == QUICK and params.get("caching", QUICK_CACHING) == QUICK_CACHING
    modes = [QUICK_MODES[kind] for kind in QUICK_MODES if kind in params]
    is_other_mode = "mode" in params and params["mode"] not in modes
    return not is_quick or is_other_mode or test.startswith(("test_fifty", "test_through_host"))


@pytest.fixture(scope="module")
def trio(request, fleet, tmp_path_factory):
    """The engines of one architecture."""
    architecture = ARCHITECTURES[request.param]
    model = make(architecture, tmp_path_factory.mktemp("model") / architecture.name)
    assert size_of(model) < 10e6
    trio = Trio(fleet, architecture, model)
    yield trio
    trio.stop()


architectures = pytest.mark.parametrize("trio", ARCHITECTURES, indirect=True, scope="module")
modes = pytest.mark.parametrize("mode", TransferMode)


def lengths_of(trio, lengths=LENGTHS):
    """Return lengths that compare exactly."""
    step = trio.step
    return tuple(dict.fromkeys(length // step * step + 1 for length in lengths)) if step else lengths


@architectures
def test_the_text_depends_on_every_part_of_the_prompt(trio):
    """Else a lost block, or a state of other tokens, would not show."""
    (question,) = random_questions(lengths_of(trio, [700]), seed="depends")

    trio.assert_depends_on_every_part(question)


@architectures
@modes
def test_equal(trio, mode):
    """From 1 to 1,900 tokens, streamed and not, some of them twice and with a common beginning."""
    asked = random_questions(lengths_of(trio, LENGTHS[::2] + LENGTHS[-1:]), seed=f"equal {mode}")
    long = asked[-1].prompt
    again = [
        asked[-1],
        asked[-2],
        ids(long[: lengths_of(trio, [600])[0]], stream=True),
        ids(long[:500] + asked[-2].prompt[: lengths_of(trio, [900])[0] - 500]),
    ]
    moved = trio.compare(mode, asked + again)
    prompts = [question.prompt for question in asked + again]

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads + moved.skipped == len(prompts)
    assert moved.loads >= len(set(prompts)) - 1  # all but the prompt of one token
    assert moved.bytes > 0
    if os.environ.get("PDRELAY_WRITE_MODELS"):
        write_table(trio.architecture, mode, moved, sum(len(prompt) - 1 for prompt in prompts))


@architectures
@modes
def test_eight_at_once(trio, mode):
    """Their states are in blocks of their own. Together, prompts are computed in steps of other sizes."""
    asked = random_questions(lengths_of(trio, range(90, 890, 100)), seed=f"at once {mode}")
    moved = trio.compare(mode, asked, at_once=8)

    assert moved.farthest <= TOLERANCE or trio.step
    assert moved.failed == {}
    assert moved.loads == len(asked)


@architectures
@modes
def test_fifty_prompts(trio, mode):
    """Random lengths, streamed every other time, eight at once where that compares exactly."""
    lengths = [1 + (number * number * 37) % 1800 for number in range(50)]
    asked = random_questions(lengths_of(trio, lengths), seed=f"fifty {mode}")
    moved = trio.compare(mode, asked, at_once=1 if trio.step else 8)

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.bytes > 0


@pytest.fixture(scope="module")
def caching(request, fleet, tmp_path_factory):
    """Engines that cache prefixes, with a cache that is too small for eight long answers."""
    architecture = ARCHITECTURES[request.param]
    model = make(architecture, tmp_path_factory.mktemp("model") / f"{architecture.name}-caching")
    trio = Trio(fleet, architecture, model, caching=True, blocks=140)
    yield trio
    trio.stop()


with_prefixes = pytest.mark.parametrize(
    "caching", [name for name, each in ARCHITECTURES.items() if each.block is not None], indirect=True, scope="module"
)


@with_prefixes
@modes
def test_prefix_hits(caching, mode):
    """On P, on D and in the single engine: the state that is loaded belongs to the whole prompt, not to a hit."""
    first, second, third, fourth, long, fresh = random_questions(
        lengths_of(caching, [33, 500, 700, 960, 1500, 330]), seed=f"hits {mode}"
    )
    part = ids(long.prompt[: lengths_of(caching, [1000])[0]], stream=True)
    tail = second.prompt[: lengths_of(caching, [400])[0] - 1]
    mixed = ids((*long.prompt[:960], *tail, 7))
    asked = [first, second, second, third, third, fourth, long, long, part, mixed]
    for question in (third, long):
        plain(caching.pair(mode).d, list(question.prompt[:640]), tokens=1)
    moved = caching.compare(mode, asked)
    _, repeated = (caching.compare(mode, [fresh]) for _ in range(2))

    assert max(moved.farthest, repeated.farthest) <= TOLERANCE
    assert moved.failed == repeated.failed == {}
    assert moved.loads + moved.skipped == len(asked)
    assert min(moved.reused) > 0
    assert repeated.reused[1] == 320  # D keeps the KV that it has loaded, though it has no state there


@pytest.mark.parametrize("caching", [QUICK_CACHING], indirect=True, scope="module")
@modes
def test_preempted_among_hits(caching, mode):
    """Eight at once, some thrown out and computed anew, from the state at a hit or from the beginning.

    Their answers are so long that the cache is too small for them however late some of the eight begin.
    """
    asked = random_questions(range(300, 620, 40), seed=f"preempted {mode}")
    asked += [ids(question.prompt[:200] + (7,) * 100) for question in asked]
    moved = caching.compare(mode, asked, at_once=8, tokens=400)

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.preempted > 0
    assert moved.bytes > 0


@pytest.fixture(scope="module")
def staged(fleet, tmp_path_factory):
    """Engines whose cache NIXL does not reach: their host memory has room for few of a long prompt's blocks."""
    model = make(ARCHITECTURES[QUICK], tmp_path_factory.mktemp("model") / "staged")
    trio = Trio(fleet, ARCHITECTURES[QUICK], model, config={"host_staging": True, "staging_blocks": 16})
    yield trio
    trio.stop()


@modes
def test_through_host_memory(staged, mode):
    """A state is copied whole, in one slot."""
    moved = staged.compare(mode, random_questions((2, 33, 257, 500, 501), seed=f"staged {mode}"), at_once=2)

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads == 5


def write_table(architecture, mode, moved, tokens):
    """Write what was seen into a cell of the page's table."""
    equal = f"within {moved.farthest:.0e}" if moved.farthest else "equal"
    cell = f"{equal}; {moved.loads:.0f} loads of {tokens:,} tokens, {moved.bytes:,.0f} bytes"
    rows = [each.title for each in ARCHITECTURES.values()]
    write_cell("tests/models/test_states.py", rows, list(TransferMode), architecture.title, mode, cell)
