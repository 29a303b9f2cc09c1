"""Models that keep a state: pulled and pushed, text and logprobs are those of a single engine, and the state moved.

``XPYD_WRITE_MODELS=1`` has the run write the table of docs/models.md.
"""

import os

import pytest

from support.architectures import ARCHITECTURES, make, size_of
from support.questions import Question
from support.shapes import random_questions
from support.tables import write_cell
from support.trios import TOLERANCE, Trio, distance
from xpyd_proxy.core.protocol.push import TransferMode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

QUICK = "granitemoehybrid"  # the one that make test runs
LENGTHS = (1, 2, 3, 31, 32, 33, 64, 65, 96, 97, 128, 129, 255, 256, 257, 258, 300, 400, 512, 513, 700, 1023, 1500, 1900)


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: all architectures but one, and long tests of that one."""
    return params.get("trio", QUICK) != QUICK or test.startswith(("test_fifty", "test_through_host"))


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
    step = trio.architecture.step
    return tuple(dict.fromkeys(length // step * step + 1 for length in lengths)) if step else lengths


@architectures
def test_the_text_depends_on_every_part_of_the_prompt(trio):
    """Else a lost block, or a state of other tokens, would not show."""
    (question,) = random_questions(lengths_of(trio, [700]), seed="depends")
    answer = trio.alone(question)

    for start in range(0, len(question.prompt) - 31, 96):
        prompt = list(question.prompt)
        prompt[start : start + 32] = [(7 * token + 13) % 480 + 10 for token in prompt[start : start + 32]]
        other = trio.alone(Question("ids", stream=False, prompt=tuple(prompt)))
        assert distance(answer, other) > 5 * TOLERANCE, f"tokens {start} to {start + 32} make no difference"


@architectures
@modes
def test_equal(trio, mode):
    """From 1 to 1,900 tokens, streamed and not, some of them twice and with a common beginning."""
    asked = random_questions(lengths_of(trio, LENGTHS[::2] + LENGTHS[-1:]), seed=f"equal {mode}")
    long = asked[-1].prompt
    again = [
        asked[-1],
        asked[-2],
        Question("ids", stream=True, prompt=long[: lengths_of(trio, [600])[0]]),
        Question("ids", stream=False, prompt=long[:500] + asked[-2].prompt[: lengths_of(trio, [900])[0] - 500]),
    ]
    moved = trio.compare(mode, asked + again)
    prompts = [question.prompt for question in asked + again]

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads + moved.skipped == len(prompts)
    assert moved.loads >= len(set(prompts)) - 1  # all but the prompt of one token
    assert moved.bytes > 0
    if os.environ.get("XPYD_WRITE_MODELS"):
        write_table(trio.architecture, mode, moved, sum(len(prompt) - 1 for prompt in prompts))


@architectures
@modes
def test_eight_at_once(trio, mode):
    """Their states are in blocks of their own. Together, prompts are computed in steps of other sizes."""
    asked = random_questions(lengths_of(trio, range(90, 890, 100)), seed=f"at once {mode}")
    moved = trio.compare(mode, asked, at_once=8)

    assert moved.farthest <= TOLERANCE or trio.architecture.step
    assert moved.failed == {}
    assert moved.loads == len(asked)


@architectures
@modes
def test_fifty_prompts(trio, mode):
    """Random lengths, streamed every other time."""
    lengths = [1 + (number * number * 37) % 1800 for number in range(50)]
    moved = trio.compare(mode, random_questions(lengths_of(trio, lengths), seed=f"fifty {mode}"))

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
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
