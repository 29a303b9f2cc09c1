"""Pairs of :mod:`support.cache_kinds` as vLLM runs engines by default: a step is scheduled while another one computes.

The device computes when the test's dice say so, at the latest when the step's output is awaited (``EngineCore.
step_with_batch_queue``). Drafts are right as often as the dice say. Requests may have priorities, and prompts may go on
from answers whose KV goes back to P (``return_kv``).
"""

import copy
import random
import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from support.cache_kinds import CONTEXT, NAN, KindsEngine, Pair
from support.scheduled_engine import Output, kv, kv_of, next_token

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    from pdrelay_connector.shell.returned_prefixes import CACHED_ON
    from pdrelay_connector.shell.worker import _offering

PRIORITIES = 3
WRONG = 99  # a token that no text has


@dataclass(frozen=True)
class Chances:
    """How a pair is run."""

    seed: int = 0
    drafts: int = 0  # for each token
    has_priorities: bool = False
    returns_kv: bool = False
    leaves: float = 0.0  # how often a client hangs up between two requests
    resets: float = 0.0  # how often an operator resets a prefix cache, likewise


class _Part(NamedTuple):
    """What a step computes of a request. ``start`` is what vLLM took for computed if all drafts were right."""

    name: str
    start: int
    count: int
    drafts: int
    has_more: bool  # of the prompt
    is_new: bool  # or begins again
    tables: list
    replay: int


@dataclass
class _Step:
    """A step in flight; ``sampled`` is there once the device has computed it."""

    scheduled: object
    parts: list
    sampled: dict | None = None
    outputs: list = field(default_factory=list)


class AsyncEngine(KindsEngine):
    """One engine with two steps in flight."""

    scheduler_class = AsyncScheduler
    most_in_flight = 2  # steps

    def __init__(self, world, name, address, shape):
        self.in_flight = deque()
        self.computed = {}
        self.texts = {}
        super().__init__(world, name, address, shape)
        drafts = world.chances.drafts
        self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = drafts
        self.scheduler._spec_token_placeholders = [-1] * drafts
        if isinstance(getattr(self.scheduler, "_spec_decode_step_blocks", None), int):  # since 0.32
            sizes = [group.kv_cache_spec.block_size for group in self.cache.kv_cache_groups]
            self.scheduler._spec_decode_step_blocks = (
                sum(-(-(1 + 2 * drafts) // size) for size in sizes) if drafts else 0
            )

    def configure(self, config):
        chances = self.world.chances
        transfer = config.kv_transfer_config
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.policy = "priority" if chances.has_priorities else "fcfs"
        transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | {"return_kv": chances.returns_kv}

    def _add(self, name, tokens, *others):
        self.texts[name] = list(tokens)
        super()._add(name, tokens, *others)

    def turn(self, now):
        outputs = super().turn(now)
        is_idle = not self.scheduler.has_requests() and self.scheduler.pause_state is PauseState.UNPAUSED
        return self._step() if self.in_flight and is_idle and not self.frozen else outputs

    def _step(self):
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            metadata = self.begin(scheduled)
            step = _Step(scheduled, self._parts(scheduled))
            self._announce(metadata.pieces)
            self.in_flight.append(step)
            self._transfer()
            if self.world.dice.random() < 0.3:
                self.compute_until(step)
            step.outputs = [self._output_of(worker, metadata, {}) for worker in self.workers]
            self._transfer()
            if scheduled.total_num_scheduled_tokens and len(self.in_flight) < self.most_in_flight:
                return []
        self.compute_until(self.in_flight[0])
        if self.world.dice.random() < 0.3:
            self.turn_of_threads(self.world.now)
        return self._take(self.in_flight.popleft())

    def _transfer(self):
        """The transfer threads may be quicker than the device."""
        for process in self.processes * self.world.dice.randrange(3):
            process.runner.wake(self.world.now)

    def begin(self, scheduled):
        """The worker gets a step; returns what is in it for our connector."""
        return scheduled.kv_connector_metadata

    def _announce(self, pieces):
        """The device has to compute all earlier steps before these blocks can be written."""
        earlier = list(self.in_flight)
        for piece in pieces:
            for process in self.processes:
                process.runner.post(_offering(piece, lambda: self.is_computed(earlier)))

    def is_computed(self, steps):
        return all(step.sampled is not None for step in steps)

    def _take(self, step):
        """What the scheduler sees of a step, and clients after it."""
        model = self._collect(step.outputs)
        model.req_ids = list(step.sampled)
        model.sampled_token_ids = list(step.sampled.values())
        model.req_id_to_index = {name: place for place, name in enumerate(step.sampled)}
        found = self.scheduler.update_from_output(step.scheduled, model)
        if not self.in_flight:
            self.check_prefix_cache()
            self.check_owners()
        return [
            Output(each.request_id, each.new_token_ids, each.finish_reason, each.kv_transfer_params)
            for outputs in found.values()
            for each in outputs.outputs
        ]

    def _parts(self, scheduled):
        begun = {new.req_id for new in scheduled.scheduled_new_reqs} | scheduled.scheduled_cached_reqs.resumed_req_ids
        parts = []
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, ())
            tables = [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]
            start = request.num_computed_tokens - count
            replay = getattr(request, "replay_start", 0)
            parts.append(
                _Part(name, start, count, len(drafts), request.is_prefill_chunk, name in begun, tables, replay)
            )
        return parts

    def compute_until(self, last):
        for step in self.in_flight:
            if step.sampled is None:
                self._zero_and_copy(step.scheduled)
                step.sampled = {part.name: self._compute_part(part) for part in step.parts}
            if step is last:
                break

    def _compute_part(self, part):
        """Compute a request's tokens and drafts; returns the tokens that come of it."""
        start = part.start if part.is_new else self.computed[part.name]
        accepted = self.world.dice.randrange(part.drafts + 1) if part.drafts and not part.is_new else 0
        stop = start + part.count
        right = stop - part.drafts + accepted
        chains = kv_of(self.text(part.name, right))
        for group, layer in self.layers:
            layer.compute(part.tables[group], start, right, chains, part.replay)
            for token in range(right, stop):
                if (slot := layer.slot(token)) is None:
                    continue
                number, place = slot
                if number < len(part.tables[group]) and part.tables[group][number]:
                    layer.put(part.tables[group][number], place, kv(chains[-1], WRONG))
        self.computed[part.name] = right
        self.world.counts["computed"] += part.count
        self.world.counts["accepted"] += accepted
        return [] if part.has_more else self.text(part.name, right + 1)[right - accepted :]

    def text(self, name, tokens):
        """Return the first tokens of a prompt and all that follows."""
        text = self.texts[name]
        while len(text) < tokens:
            text.append(next_token(text))
        return text[:tokens]

    def sleep(self, mode="keep"):
        """As ``EngineCoreProc.sleep`` does it in one of vLLM's modes: steps in flight come to their end before."""
        if mode == "abort":
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        while self.scheduler.has_requests() or self.in_flight:
            self._wait(None)
            for output in self._step():
                self.world._heard(output)
        super().sleep()
        for _, layer in self.layers:
            layer.bytes[:] = NAN  # the memory is another's

    def check_owners(self):
        """Each block has exactly the owners that know of it."""
        scheduler = self.scheduler
        owned = [
            *(block for lease in self.prefills._held_blocks._leases.values() for block in lease.blocks),
            *(block for load in self.decodes._quarantined._loads.values() for block in load.blocks),
            *(block for each in self.prefills._window_pins._pinned.values() for ids in each.blocks for block in ids),
            *(block for _, blocks in scheduler.deferred_frees for block in blocks),
        ]
        tables = [ids for name in scheduler.requests for ids in scheduler.kv_cache_manager.get_block_ids(name)]
        owners = Counter([*(block.block_id for block in owned), *(block for ids in tables for block in ids)])
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == owners[block.block_id], f"block {block.block_id} of {self.name}: other owners"


class AsyncPair(Pair):
    """Both engines have two steps in flight."""

    engine_class = AsyncEngine
    compares = False
    modes = ("pull", "push", "pull", "push", "d", "p")
    rest = 60.0  # s in which all that is left ends

    def __init__(self, p, d, chances):
        self.chances = chances
        self.dice = random.Random(chances.seed)
        super().__init__(p, d)
        if chances.returns_kv:
            self.prefill_params = {CACHED_ON: self.d.name}

    def meddle(self):
        """Have a client leave, or an operator reset a prefix cache, now and then."""
        dice = self.dice
        if dice.random() < self.chances.leaves and (names := [name for name in self.asked if not self.is_over(name)]):
            self.leave(dice.choice(names))
        if dice.random() < self.chances.resets:
            self.counts["reset"] += dice.choice((self.p, self.d)).scheduler.reset_prefix_cache()

    def is_over(self, name):
        _, said, most = self.asked[name]
        return len(said) == most

    def next_prompt(self, trunk, forks):
        """Return a prompt that begins as others do, or goes on from an answer."""
        dice = self.dice
        if self.chances.returns_kv and dice.random() < 0.6:
            answered = [[*prompt, *said] for prompt, said, _ in self.asked.values() if said]
            if answers := [each for each in answered if len(each) < CONTEXT - 20]:
                return [*dice.choice(answers), *dice.choices(range(3), k=dice.randrange(1, 6))]
        return trunk[: dice.choice(forks)] + dice.choices(range(3), k=dice.randrange(1, 20))


def play(p, d, chances, *, requests=20, pair_class=AsyncPair):
    """Send prompts to a pair, some of them at once; returns it when all texts are there and nothing is left."""
    pair = pair_class(p, d, chances)
    dice = pair.dice
    trunk = dice.choices(range(3), k=CONTEXT)
    forks = dice.choices(range(60), k=3)
    for number in range(requests):
        prompt = pair.next_prompt(trunk, forks)
        most = min(dice.randrange(1, 14), CONTEXT - len(prompt) - 6)
        priority = dice.randrange(PRIORITIES) if chances.has_priorities else 0
        pair.ask(f"r{number}", prompt, most, dice.choice(pair.modes), priority)
        for _ in range(dice.choice((0, 0, 0, 1, 3, 8))):
            pair.round()
            pair.meddle()
    pair.heal()
    for _ in range(300):
        if pair.is_done:
            break
        pair.run(1.0)
    assert pair.is_done, "some texts are missing"
    pair.counts["loaded"] = len(pair.d.loaded)
    pair.run(pair.rest)
    for engine in (pair.p, pair.d):
        assert engine.pool.get_num_free_blocks() == engine.shape.blocks - 1, f"{engine.name} lost blocks"
        pair.counts["returned"] += engine.connector.seen["prefixes_found"]
    return pair
