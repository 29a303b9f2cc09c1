"""Engines of unequal shapes that play prefill and decode in turn, and the answers of single engines to compare with."""

import contextlib
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.cluster import SOON, Watch, engine_spec, metrics, nothing_held, start_engine, wait_until
from support.legs import coordinates, plain, prefill, push
from support.questions import ask, client, differences, ids

TWO_RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
# Steps of 256 tokens: a prompt is computed, and pushed, in several.
SMALL_STEPS = ("--max-num-batched-tokens", "256")
CACHE_BLOCKS = 1024  # of an engine of one rank, 32 tokens a block and 128 MiB
STAGED = {"host_staging": True, "staging_blocks": CACHE_BLOCKS // 10}
COMPUTED, CACHED, LOADED = (
    f"vllm:prompt_tokens_by_source_total|{source}"
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
)
BYTES = "vllm:pdrelay_bytes_transferred_total"
PUSHES = "vllm:pdrelay_pushes_total"  # on each rank
STAGED_OUT, STAGED_IN = "vllm:pdrelay_bytes_staged_out_total", "vllm:pdrelay_bytes_staged_in_total"


@dataclass(frozen=True)
class Shape:
    """What is special about an engine; its model is one of those of :mod:`support.models`, or the tiny one."""

    model: str = "tiny"
    args: tuple[str, ...] = ()
    block_size: int = 32  # tokens
    staged: bool = False

    @property
    def ranks(self):
        """How many workers it has."""
        return 2 if self.args == TWO_RANKS else 1


SHAPES = {
    "plain": Shape(),
    "twin": Shape(args=TWO_RANKS),
    "twin-too": Shape(args=TWO_RANKS),
    "large": Shape(block_size=64),
    "staged": Shape(staged=True),
    "staged-too": Shape(staged=True),
    "shared": Shape(model="one-head"),
    "shared-twin": Shape(model="one-head", args=TWO_RANKS),
}

# What is moved -> who computes the prompt and who decodes. In an order that lets few engines run at the same time.
ROWS = {
    "tp1-to-tp2": ("plain", "twin"),
    "tp2-to-tp1": ("twin", "plain"),
    "tp2-to-tp2": ("twin", "twin-too"),
    "block32-to-64": ("plain", "large"),
    "block64-to-32": ("large", "plain"),
    "staged-on-p": ("staged", "plain"),
    "staged-on-d": ("plain", "staged"),
    "staged-on-both": ("staged", "staged-too"),  # these are there for further tests
    "shared-head-tp1-to-tp2": ("shared", "shared-twin"),
    "shared-head-tp2-to-tp1": ("shared-twin", "shared"),
}


@dataclass(frozen=True)
class Pair:
    """Two engines, and how the second finds the first in push."""

    p: object
    d: object
    mode: TransferMode
    where: dict | None

    def ask(self, question, **options):
        """Have a question answered by both engines; D is told more in ``options``."""
        return self.begin(question)(**options)

    def begin(self, question):
        """Have P do what it does before D is asked, and return what asks D; in push, that asks both at once."""
        if self.where is not None:
            return lambda **options: push(self.p, self.d, question, self.where, **options)[0]
        params = prefill(self.p, list(question.prompt))
        api = client(self.d.base_url)  # 30 ms of CPU, which would keep those that ask D at once apart
        return functools.partial(self._decode, api, question, kv_transfer_params=params)

    @staticmethod
    def _decode(api, question, **options):
        with api:
            return ask(api, question, **options)


class Gang:
    """The engines of one mode, running while a row that may still be asked for needs them."""

    def __init__(self, fleet, models, mode):
        self.fleet = fleet
        self.models = models
        self.mode = mode
        self.running = {}  # name of a shape -> spec, child
        self.met = {}  # row -> pair

    def pair(self, row):
        """Return the engines of a row; those that neither it nor any later row needs are stopped."""
        if row not in self.met or any(name not in self.running for name in ROWS[row]):
            later = list(ROWS.values())[list(ROWS).index(row) :]
            self._stop([name for name in self.running if not any(name in names for names in later)])
            self._start([name for name in ROWS[row] if name not in self.running])
            p, d = (self.running[name][0] for name in ROWS[row])
            where = meet(p, d, SHAPES[ROWS[row][0]].ranks) if self.mode is TransferMode.PUSH else None
            self.met[row] = Pair(p, d, self.mode, where)
        return self.met[row]

    def log_of(self, name):
        """Return what a running engine has written so far."""
        return self.running[name][1].log.read_text(errors="replace")

    def stop(self):
        """End all of them."""
        self._stop(list(self.running))

    def _start(self, names):
        specs = {name: self._spec(name) for name in names}
        started = {name: (spec, start_engine(self.fleet, spec)) for name, spec in specs.items()}
        self.running |= started
        self.fleet.wait_ready([child for _, child in started.values()], timeout_s=300)

    def _stop(self, names):
        children = [self.running.pop(name)[1] for name in names]
        self.fleet.stop(*(child for child in children if child in self.fleet.children))

    def _spec(self, name):
        shape = SHAPES[name]
        return engine_spec(
            f"{self.mode.value}-{name}",
            self.models[shape.model],
            connector=Connector.PDRELAY,
            mode=self.mode,
            block_size=shape.block_size,
            extra_connector_config=STAGED if shape.staged else {},
            extra_args=(*SMALL_STEPS, *shape.args),
        )


def meet(p, d, ranks):
    """Have P push something to D, and return how D reaches it once all ranks of P have told what they wrote.

    vLLM collects the numbers of a worker with a step: part of them would come while others are counted.
    """
    before = metrics(p).get(PUSHES, 0.0)
    where = coordinates(p, d)

    def all_told():
        plain(p, [1], tokens=1)
        return metrics(p)[PUSHES] >= before + ranks

    wait_until(all_told, seconds=30, what=f"{p.name} has told what it pushed")
    return where


@contextlib.contextmanager
def watched(pair):
    """Watch the counters of a pair during a block, and let both compute one token more at its end.

    vLLM collects the numbers of a worker with a step, and a transfer may end after the last one.
    """
    with Watch(pair.p) as prefilled, Watch(pair.d) as decoded:
        yield prefilled, decoded
        for spec in (pair.p, pair.d):
            wait_until(lambda spec=spec: nothing_held(spec), seconds=SOON, what=f"{spec.name} holds nothing")
            plain(spec, [1], tokens=1)


def most_bytes(prompts):
    """Return what may be sent for prompts: blocks of 64 tokens.

    In float32, a token takes 4 KiB: K and V of 4 heads of 32 on 4 layers. Two ranks that share a head both take it.
    """
    return sum(4096 * -(-len(prompt) // 64) * 64 for prompt in prompts)


def random_questions(lengths, *, seed):
    """Return a question of random token ids for each length, streamed every other time."""
    rnd = random.Random(seed)
    return [
        ids([rnd.randrange(10, 500) for _ in range(length)], stream=number % 2 == 1)
        for number, length in enumerate(lengths)
    ]


def wrong_answers(pair, asked, reference, *, at_once=1):
    """Ask the questions, several at once, and return what differs from a single engine's answers."""
    with ThreadPoolExecutor(at_once) as pool:
        ours = list(pool.map(pair.ask, asked))
        theirs = list(pool.map(reference, asked))
    return {
        f"{number}: {question}": found
        for number, (question, our, their) in enumerate(zip(asked, ours, theirs, strict=True))
        if (found := differences(our, their))
    }
