"""One model on a single engine and on pairs that pull and push: asked the same, compared, and counted."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from support.cluster import Watch, engine_spec, metrics, nothing_held, start_engine, wait_until
from support.legs import plain
from support.questions import ask, client
from support.shapes import BYTES, Pair, meet
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.local.recipe import Connector

TOLERANCE = 1e-3  # of a logprob
DIFFERENT = 10.0  # stands for another text: no logprob is so far from another
SMALL_STEPS = 256  # tokens: longer prompts are computed, and pushed, in several steps
LOADS, SKIPPED = "vllm:xpyd_loads_total", "vllm:xpyd_loads_skipped_local_total"


def distance(ours, theirs):
    """Return by how much the farthest logprobs of two answers differ; another text is farther than any."""
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
    failed: dict  # counters of failed loads and refused offers that moved


class Trio:
    """A single engine without a connector, and a pair of engines for each mode."""

    def __init__(self, fleet, architecture, model, *, config=None):
        self.architecture = architecture
        self._config = config or {}  # of the connector
        step = architecture.step or SMALL_STEPS
        # With prefix caching, a single CPU engine of vLLM 0.32 dies (Mamba 2), or computes other steps than a P.
        args = ("--dtype", architecture.dtype, "--max-num-batched-tokens", str(step), "--no-enable-prefix-caching")
        self._options = {"extra_args": args, "kv_cache_mib": 64}
        self._fleet = fleet
        self.single = engine_spec(f"{architecture.name}-single", model, **self._options)
        specs = {mode: [self._spec(model, mode, side) for side in "pd"] for mode in TransferMode}
        everyone = [self.single, *(spec for pair in specs.values() for spec in pair)]
        self._children = [start_engine(fleet, spec) for spec in everyone]
        fleet.wait_ready(self._children, timeout_s=300)
        self.pairs = {
            mode: Pair(p, d, mode, meet(p, d, 1) if mode is TransferMode.PUSH else None)
            for mode, (p, d) in specs.items()
        }

    def _spec(self, model, mode, side):
        name = f"{self.architecture.name}-{mode.value}-{side}"
        common = {"connector": Connector.XPYD, "mode": mode, "extra_connector_config": self._config}
        return engine_spec(name, model, **common, **self._options)

    def alone(self, question):
        """Ask the single engine."""
        with client(self.single.base_url) as api:
            return ask(api, question)

    def compare(self, mode, asked, *, at_once=1):
        """Ask a pair and the single engine, and return what was moved once nothing is held."""
        pair = self.pairs[mode]
        theirs = list(map(self.alone, asked))
        with Watch(pair.p) as prefilled, Watch(pair.d) as decoded:
            with ThreadPoolExecutor(at_once) as pool:
                ours = list(pool.map(pair.ask, asked))
            for spec in (pair.p, pair.d):
                wait_until(lambda spec=spec: nothing_held(spec), seconds=5, what=f"{spec.name} holds nothing")
                plain(spec, [1], tokens=1)  # vLLM collects the numbers of a worker with a step
        return Moved(
            max(map(distance, ours, theirs)),
            prefilled.delta(BYTES) if mode is TransferMode.PUSH else decoded.delta(BYTES),
            decoded.delta(LOADS),
            decoded.delta(SKIPPED),
            {name: decoded.delta(name) for name in metrics(pair.d) if _is_failure(name) and decoded.delta(name)},
        )

    def stop(self):
        """End all engines."""
        self._fleet.stop(*(child for child in self._children if child in self._fleet.children))


def _is_failure(name):
    return name.startswith(("vllm:xpyd_loads_failed", "vllm:xpyd_kv_params", "vllm:xpyd_loads_skipped_lease"))
