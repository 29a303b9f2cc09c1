"""Models without a state: through both modes, text and logprobs are those of a single engine, and their KV moved.

``PDRELAY_WRITE_MODELS=1`` has the run write the table of docs/models.md, with vLLM's own connector beside ours.
"""

import os

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.architectures import make, size_of
from support.attention import ATTENTION, WINDOW
from support.questions import ids
from support.shapes import random_questions
from support.tables import write_cell
from support.trios import TOLERANCE, Trio

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CASES = [(label, mode) for label in ATTENTION for mode in TransferMode]
# The ordinary tests have the layouts that are least alike, each in one mode: six groups of layers, of which five have
# a window that a push follows; two groups of two, with sinks and experts.
QUICK = [("gemma3_text", TransferMode.PUSH), ("gpt_oss", TransferMode.PULL)]
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 97, 129, 256, 257, 300, 513, 700, 1023, 1500, 1900)
# D's window begins with the last token of a block, which a P that has computed the last token, too, does not need any
# more. What one missing token changes may be little, so there are several.
EDGES = tuple(WINDOW - 1 + 32 * blocks for blocks in (1, 2, 13, 29))
NIXL = "vLLM's NixlConnector, pull"
WRITING = os.environ.get("PDRELAY_WRITE_MODELS")


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: all but two cases, and of those what takes long."""
    return params["trio"] not in QUICK or test == "test_fifty_prompts"


@pytest.fixture(scope="module")
def trio(request, fleet, tmp_path_factory):
    """The engines of one architecture."""
    label, mode = request.param
    architecture = ATTENTION[label]
    model = make(architecture, tmp_path_factory.mktemp("model") / label)
    assert size_of(model) < 10e6
    trio = Trio(fleet, architecture, model, caching=True, blocks=architecture.blocks, modes=[mode])
    yield trio
    trio.stop()


cases = pytest.mark.parametrize("trio", CASES, indirect=True, scope="module", ids="-".join)


@cases
def test_the_text_depends_on_every_part_of_the_prompt(trio):
    """Else a lost block would not show. What a window does not see, it has passed on to the layers above."""
    (question,) = random_questions([700], seed="depends")

    trio.assert_depends_on_every_part(question)


@cases
def test_equal(trio):
    """From 1 to 1,900 tokens, streamed and not, some of them twice and with a common beginning."""
    (mode,) = trio.modes
    asked = random_questions((*LENGTHS, *EDGES), seed=f"equal {mode}")
    (long,) = (question.prompt for question in asked if len(question.prompt) == 1900)
    again = [
        ids(long),
        ids(long[:600], stream=True),
        ids(long[:500] + asked[-2].prompt[:400]),
    ]
    moved = trio.compare(mode, asked + again)
    prompts = [question.prompt for question in asked + again]

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads + moved.skipped == len(prompts)
    assert moved.bytes > 0
    assert (moved.reused[0] > 0) == trio.architecture.caches
    if trio.architecture.caches and not trio.architecture.near:  # of a loaded window D keeps little
        assert moved.reused[1] > 0
    if WRITING:
        tokens = sum(len(prompt) - 1 for prompt in prompts)
        equal = f"within {moved.farthest:.0e}" if moved.farthest else "equal"
        write(trio, mode.value, f"{equal}; {moved.loads:.0f} loads of {tokens:,} tokens, {moved.bytes:,.0f} bytes")
        if mode is TransferMode.PULL:
            edges_first = [(question, trio.alone(question)) for question in asked[::-2]]
            write(trio, NIXL, trio.beside(edges_first))


@cases
def test_eight_at_once(trio):
    """And only what the layers still need is sent: of a window, that and a block at either end."""
    (mode,) = trio.modes
    lengths = range(90, 890, 100)
    moved = trio.compare(mode, random_questions(lengths, seed=f"at once {mode}"), at_once=8)

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads == len(lengths)
    assert least_bytes(trio.architecture, lengths) <= moved.bytes <= most_bytes(trio.architecture, lengths)


@cases
def test_preempted(trio):
    """The cache is too small for three long answers, so for eight of which some begin late, too.

    What is thrown out is computed again.
    """
    (mode,) = trio.modes
    asked = random_questions(range(300, 460, 20), seed=f"preempted {mode}")
    moved = trio.compare(mode, asked, at_once=8, tokens=400)

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.preempted > 0


@cases
def test_fifty_prompts(trio):
    """Random lengths, streamed every other time."""
    (mode,) = trio.modes
    lengths = [2 + (number * number * 37) % 1800 for number in range(50)]
    moved = trio.compare(mode, random_questions(lengths, seed=f"fifty {mode}"))

    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads + moved.skipped == 50


def least_bytes(architecture, lengths):
    """Return what must be sent for prompts that nobody knows: all tokens but the last, of layers without a window."""
    return architecture.token_bytes * architecture.full * sum(length - 1 for length in lengths) or 1


def most_bytes(architecture, lengths):
    """Return what may be sent: whole blocks, and of layers with a window those that it covers."""
    tokens = [-(-length // 32) * 32 for length in lengths]
    near = [min(count, WINDOW + 64) for count in tokens]
    return architecture.token_bytes * (architecture.full * sum(tokens) + architecture.near * sum(near))


def write(trio, column, text):
    """Write a cell of the page's table."""
    columns = [*TransferMode, NIXL]
    rows = [architecture.title for architecture in ATTENTION.values()]
    write_cell("tests/models/test_attention.py", rows, columns, trio.architecture.title, column, text)
