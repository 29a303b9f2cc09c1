"""One model on a single engine and on pairs that pull and push: asked the same, compared, and counted."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.recipe import Connector
from pdrelay_tools.proving.core.answer import Malformed
from support.cluster import SOON, Watch, engine_spec, metrics, nothing_held, start_engine, wait_until
from support.legs import plain
from support.questions import TOKENS, ask, client, ids
from support.shapes import BYTES, CACHED, Pair, meet

TOLERANCE = 1e-3  # of a logprob
DIFFERENT = 10.0  # stands for another text: no logprob is so far from another
SMALL_STEPS = 256  # tokens: longer prompts are computed, and pushed, in several steps
PREEMPTIONS, HITS = "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"
IDS = {"return_tokens_as_token_ids": True, "ignore_eos": True}  # two tokens may have the same text
LOADS, SKIPPED = "vllm:pdrelay_loads_total", "vllm:pdrelay_loads_skipped_local_total"


def distance(ours, theirs):
    """Return by how much the farthest logprobs of two answers differ; another text is farther than any."""
    (ours,), (theirs,) = ours.choices, theirs.choices
    if (ours.text, ours.tokens) != (theirs.text, theirs.tokens):
        return DIFFERENT
    return max((abs(our - their) for our, their in zip(ours.logprobs, theirs.logprobs, strict=True)), default=0.0)


@dataclass(frozen=True)
class Moved:
    """What a pair did for some questions."""

    farthest: float
    bytes: float
    loads: float
    skipped: float  # full hits of D's own cache
    reused: tuple[float, float]  # prompt tokens that P and D had in their own caches
    preempted: float  # on either side
    failed: dict  # counters of failed loads and refused offers that moved


class Trio:
    """A single engine without a connector, and a pair of engines for each mode, from when it is first asked for."""

    def __init__(self, fleet, architecture, model, *, config=None, caching=False, blocks=None, modes=TransferMode):
        self.architecture = architecture
        self._config = config or {}  # of the connector
        self.step = architecture.block if caching else architecture.step  # 0: prompts of any length compare exactly
        cache = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
        args = ("--dtype", architecture.dtype, "--max-num-batched-tokens", str(self.step or SMALL_STEPS), cache)
        self._options = {"extra_args": (*args, *architecture.args), "kv_cache_mib": 64}
        self._blocks = blocks  # of D: a P with so few could not lend eight prompts
        self._fleet, self._model = fleet, model
        self.modes = modes
        self.pairs = {}
        self._children = []
        self.single = engine_spec(f"{architecture.label}-single", model, **self._options)
        self._start(self.single)

    def pair(self, mode):
        """Return the engines that move KV in one way."""
        if mode not in self.pairs:
            p, d = (self._spec(mode, side) for side in "pd")
            self._start(p, d)
            self.pairs[mode] = Pair(p, d, mode, meet(p, d, 1) if mode is TransferMode.PUSH else None)
        return self.pairs[mode]

    def _start(self, *specs):
        children = [start_engine(self._fleet, spec) for spec in specs]
        self._children += children
        self._fleet.wait_ready(children, timeout_s=300)

    def _spec(self, mode, side, connector=Connector.PDRELAY):
        name = f"{self.architecture.label}-{connector.value}-{mode.value}-{side}"
        config = self._config if connector is Connector.PDRELAY else {}
        common = {"connector": connector, "mode": mode, "extra_connector_config": config}
        spec = engine_spec(name, self._model, **common, **self._options)
        few = ("--num-gpu-blocks-override", str(self._blocks)) if self._blocks and side == "d" else ()
        return dataclasses.replace(spec, extra_args=(*spec.extra_args, *few))

    def alone(self, question, *, tokens=TOKENS):
        """Ask the single engine."""
        with client(self.single.base_url) as api:
            return ask(api, question, tokens=tokens, **IDS)

    def assert_depends_on_every_part(self, question):
        """Assert that the single engine's answer is another one if 32 tokens anywhere in the prompt are."""
        answer = self.alone(question)
        for start in range(0, len(question.prompt) - 31, 96):
            prompt = list(question.prompt)
            prompt[start : start + 32] = [(7 * token + 13) % 480 + 10 for token in prompt[start : start + 32]]
            other = self.alone(ids(prompt))
            assert distance(answer, other) > 5 * TOLERANCE, f"tokens {start} to {start + 32} make no difference"

    def compare(self, mode, asked, *, at_once=1, tokens=TOKENS):
        """Ask a pair and the single engine, and return what was moved once nothing is held.

        D is asked so many at once, all of which P has begun before: else the first would be over before the last came.
        """
        pair = self.pair(mode)
        with Watch(pair.p) as prefilled, Watch(pair.d) as decoded:
            ours = []
            with ThreadPoolExecutor(at_once) as pool:
                theirs = list(pool.map(lambda question: self.alone(question, tokens=tokens), asked))
                for first in range(0, len(asked), at_once):
                    begun = list(pool.map(pair.begin, asked[first : first + at_once]))
                    ours += pool.map(lambda decode: decode(tokens=tokens, **IDS), begun)
            for spec in (pair.p, pair.d):
                wait_until(lambda spec=spec: nothing_held(spec), seconds=SOON, what=f"{spec.name} holds nothing")
                plain(spec, [1], tokens=1)  # vLLM collects the numbers of a worker with a step
        return Moved(
            max(map(distance, ours, theirs)),
            prefilled.delta(BYTES) if mode is TransferMode.PUSH else decoded.delta(BYTES),
            decoded.delta(LOADS),
            decoded.delta(SKIPPED),
            (prefilled.delta(HITS), decoded.delta(CACHED)),
            prefilled.delta(PREEMPTIONS) + decoded.delta(PREEMPTIONS),
            {name: decoded.delta(name) for name in metrics(pair.d) if _is_failure(name) and decoded.delta(name)},
        )

    def beside(self, asked, *, seconds=40):
        """Return how vLLM's own connector does, in a few words: questions and their answers, for so many seconds."""
        p, d = (self._spec(TransferMode.PULL, side, Connector.NIXL) for side in "pd")
        children = [start_engine(self._fleet, spec) for spec in (p, d)]
        pair, found = Pair(p, d, TransferMode.PULL, None), {}  # length -> distance
        try:
            self._fleet.wait_ready(children, timeout_s=120)
            end = time.monotonic() + seconds
            for question, answer in asked:
                if time.monotonic() > end:
                    break
                found[len(question.prompt)] = distance(pair.ask(question, **IDS), answer)
        except LocalError as error:
            return f"does not start: {str(error).splitlines()[0]}"
        except (httpx.HTTPError, Malformed, KeyError) as error:
            return f"fails after {len(found)} prompts: {str(error).splitlines()[0]}"
        finally:
            self._fleet.stop(*(child for child in children if child in self._fleet.children))
        wrong = sorted(length for length, each in found.items() if each > TOLERANCE)
        which = f"; not {', '.join(map(str, wrong))} tokens" if wrong else ""
        return f"{len(found) - len(wrong)} of {len(found)} equal{which}"

    def stop(self):
        """End all engines."""
        self._fleet.stop(*(child for child in self._children if child in self._fleet.children))


def _is_failure(name):
    return name.startswith(("vllm:pdrelay_loads_failed", "vllm:pdrelay_kv_params", "vllm:pdrelay_loads_skipped_lease"))
