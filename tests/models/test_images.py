"""A model that sees images, asked through the router: what stands for their pixels is moved as any other token's KV."""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from support.images import LLAVA, make_llava, seen
from support.questions import ask, client
from support.shapes import Pair
from support.trios import TOLERANCE, Trio, distance

# Six engines start. The ordinary tests have the digest of a prompt, which images are part of.
# vLLM 0.32's module of LLaVA imports transformers' image processor of Pixtral, and that imports torchvision, whose
# build for the CPU's PyTorch only PyTorch's own index has.
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's LLaVA needs torchvision"),
]
ASKED = (
    seen("what is this", 1),
    seen("what is this", 2),  # of the same size: it must not be taken for the first one
    seen("and this", 1, stream=True),
    seen("what are these", 1, 3),
    seen("what are these", 3, 1, stream=True),
    seen("what is this", 1),  # P and D know it
    seen("what is the capital of the country " * 20, 4),
)


@dataclass(frozen=True)
class Routed(Pair):
    """Two engines behind a router."""

    url: str

    def ask(self, question, **options):
        with client(self.url) as api:
            return ask(api, question, **options)


@pytest.mark.parametrize("mode", TransferMode)
def test_images(mode, fleet, start_router, tmp_path):
    """One or two in a prompt, the same one again, and another one in its place."""
    trio = Trio(fleet, LLAVA, make_llava(tmp_path / "llava"), caching=True, modes=[mode])
    pair = trio.pair(mode)
    url = start_router(f"router-images-{mode.value}", [pair.p], [pair.d])
    trio.pairs[mode] = Routed(pair.p, pair.d, mode, pair.where, url)
    alone = [trio.alone(question) for question in ASKED]
    moved = trio.compare(mode, ASKED)
    trio.stop()

    assert distance(alone[0], alone[1]) > 5 * TOLERANCE  # the text depends on the image,
    assert distance(alone[3], alone[4]) > 5 * TOLERANCE  # and on their order
    assert moved.farthest <= TOLERANCE
    assert moved.failed == {}
    assert moved.loads + moved.skipped == len(ASKED)
    assert moved.bytes > 0
