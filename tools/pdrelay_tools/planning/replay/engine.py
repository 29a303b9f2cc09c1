"""A simulated engine: vLLM's scheduler, step by step; the seconds of a step are its model's."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp
from random import Random
from typing import Final

from pdrelay_proxy.core.model import Role
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.kv_cache import CacheEvents, KvCache


class EventLoop:
    """Virtual time: makes calls in the order of their times, and then of `after`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due = list[tuple[float, int, Callable[[], None]]]()
        self._order = count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after so many seconds."""
        heappush(self._due, (self.now + seconds, next(self._order), act))

    def run(self) -> None:
        """Make all calls, until none is left."""
        while self._due:
            self.now, _, act = heappop(self._due)
            act()


@dataclass(frozen=True, slots=True)
class TurnedEngine:
    """One role change. Times are seconds of the replay."""

    began: float
    ended: float  # when the engine served its new role
    role: Role  # the new one
    prefill: int  # engines afterwards
    decode: int


@dataclass(slots=True, eq=False)
class VirtualLeg:
    """One engine's part in a request."""

    blocks: Sequence[int]  # that the prompt fills
    prompt_tokens: int
    output_tokens: int
    answer: Sequence[int] = ()  # blocks that the answer fills
    # the engine and its leg that computed the prompt, and hold it until it is read
    source: "tuple[VirtualEngine, VirtualLeg] | None" = None
    holds_blocks: bool = False  # its blocks stay in use until another engine has read them
    first: Callable[[], None] = lambda: None  # has its first token
    ended: "Callable[[VirtualLeg], None]" = lambda _: None  # it has all its tokens
    cached_tokens: int = 0  # hit in this engine's own cache
    computed_tokens: int = 0  # of the prompt
    uncomputed_tokens: int = 0  # tokens of the prompt that are still to be computed


@dataclass(slots=True)
class EngineLog:
    """The work of one engine so far."""

    busy_s: float = 0.0
    computed_tokens: int = 0  # of prompts
    legs: int = 0  # that are over
    itl_sum_s: float = 0.0  # seconds that answers waited for their next tokens
    itl_count: int = 0  # tokens that came after the first of their answer
    # seconds, tokens that waited them
    gaps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class VirtualEngine:
    """Runs legs: each step makes a token for every answer, and fills up with prompts' chunks.

    A step has at most max_num_batched_tokens, as in vLLM (vllm/v1/core/sched/scheduler.py).
    """

    def __init__(
        self,
        model: EngineModel,
        block_tokens: int,
        loop: EventLoop,
        stepped: Callable[[float], None] = lambda _: None,
        *,
        seed: int = 0,
        events: CacheEvents | None = None,
    ) -> None:
        """``stepped``: called with the seconds between the latest two tokens of its answers.

        ``seed``: of the jitter; ``events``: where its cache publishes changes (None: nowhere).
        """
        self.log: Final = EngineLog()
        self.waiting: Final = deque[VirtualLeg]()
        self.model: Final = model
        self._block_tokens = block_tokens
        self._loop = loop
        self._report_gap = stepped
        self._chance = Random(seed)
        self._cache = KvCache(model.kv_tokens // block_tokens, events)
        self._loaded = deque[VirtualLeg]()  # their KV has arrived
        self._prefilling = list[VirtualLeg]()
        self._ends = list[tuple[int, int, VirtualLeg]]()  # answers by the step of their last token
        self._order = count()
        self._context = 0  # tokens before the next ones of all answers
        self._steps = 0
        self._stepping = False
        self._reading = 0  # legs whose KV is on its way
        self.link_free = 0.0  # the time when its link has carried all transfers so far
        self._api_free = 0.0  # the time when its API server has done all its work so far
        self._sent_at = 0.0  # when clients got the latest tokens

    @property
    def kv_use(self) -> float:
        """Return the share of its blocks that are in use."""
        return self._cache.used / self._cache.blocks

    @property
    def running(self) -> int:
        """Return how many legs it computes."""
        return len(self._prefilling) + len(self._ends)

    @property
    def queued(self) -> int:
        """Return how many legs wait: for room, or for their KV."""
        return len(self.waiting) + len(self._loaded) + self._reading

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Tell whether an empty engine has room for a request."""
        return -(-(prompt_tokens + output_tokens) // self._block_tokens) <= self._cache.blocks

    def cached(self, names: Sequence[int]) -> int:
        """Return how many blocks of this prefix its cache has."""
        return self._cache.count_cached(names)

    def send(self, leg: VirtualLeg) -> None:
        """Send a leg to its API server, which queues it when it gets to it."""
        model = self.model
        took = self._api(model.api_request_s + leg.prompt_tokens * model.api_prompt_token_s)
        self._loop.after(took + model.leg_s, lambda: self.add(leg))

    def add(self, leg: VirtualLeg) -> None:
        """Queue a leg."""
        self.waiting.append(leg)
        self._wake()

    def _api(self, seconds: float) -> float:
        """Add work for the API server; return in how many seconds that is done."""
        now = self._loop.now
        self._api_free = max(now, self._api_free) + seconds
        return self._api_free - now

    def release(self, leg: VirtualLeg) -> None:
        """Free the blocks of a leg; their content stays until the room is needed."""
        self._cache.release_blocks(leg.blocks, self._unnamed(leg), leg.answer)
        self._wake()

    def _unnamed(self, leg: VirtualLeg) -> int:
        # Room for the whole answer is taken at once, so nothing is ever preempted.
        return -(-(leg.prompt_tokens + leg.output_tokens) // self._block_tokens) - len(leg.blocks)

    def _wake(self) -> None:
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        chunks = list[tuple[VirtualLeg, int]]()
        seconds = 0.0
        budget = self.model.max_num_batched_tokens - len(self._ends)
        for leg in self._to_prefill():
            if budget <= 0:
                break
            tokens = min(leg.uncomputed_tokens, budget)
            budget -= tokens
            seconds += self.model.chunk_s(tokens, leg.prompt_tokens - leg.uncomputed_tokens)
            chunks.append((leg, tokens))
        self._stepping = bool(chunks or self._ends)
        if self._stepping:
            seconds += self.model.step_s + self.model.batch_s(len(self._ends), self._context)
            if self.model.jitter:  # the mean stays what it is
                seconds *= exp(
                    self._chance.gauss(0.0, self.model.jitter) - self.model.jitter**2 / 2
                )
            self.log.busy_s += seconds
            self._loop.after(seconds, lambda: self._stepped(chunks, seconds))

    def _to_prefill(self) -> "list[VirtualLeg]":
        """Admit the legs that there is room for, and return all legs with a prompt to compute."""
        if not (self._prefilling or self._loaded or self.waiting):
            return self._prefilling
        tokens = sum(leg.uncomputed_tokens for leg in self._prefilling)
        most = self.model.max_num_batched_tokens - len(self._ends)
        while tokens < most and len(self._prefilling) + len(self._ends) < self.model.max_num_seqs:
            leg = self._loaded.popleft() if self._loaded else self._admitted()
            if leg is None:
                break
            self._prefilling.append(leg)
            leg.computed_tokens = leg.uncomputed_tokens
            tokens += leg.uncomputed_tokens
        return self._prefilling

    def _admitted(self) -> VirtualLeg | None:
        """Return the next leg that can compute; legs that need remote KV begin to read it."""
        while self.waiting:
            leg = self.waiting[0]
            cached_blocks = min(
                self._cache.count_cached(leg.blocks), (leg.prompt_tokens - 1) // self._block_tokens
            )
            if not self._cache.use_blocks(leg.blocks, self._unnamed(leg)):
                return None
            self.waiting.popleft()
            leg.cached_tokens = cached_blocks * self._block_tokens
            leg.uncomputed_tokens = leg.prompt_tokens - leg.cached_tokens
            if leg.source is None:
                return leg
            self._read(leg, *leg.source)
        return None

    def _read(self, leg: VirtualLeg, source: "VirtualEngine", source_leg: VirtualLeg) -> None:
        """Read the missing KV over both engines' links, which carry one transfer at a time."""
        missing = leg.uncomputed_tokens * self.model.kv_bytes_per_token
        self._reading += 1
        begins = max(self._loop.now, self.link_free, source.link_free)
        ends = begins + self.model.link_s + missing / self.model.link_bytes_per_s
        self.link_free = source.link_free = ends

        def arrived() -> None:
            source.release(source_leg)
            self._reading -= 1
            # vLLM computes a prompt's last token even if it has all KV:
            # (vllm/v1/core/kv_cache_manager.py, get_computed_blocks).
            leg.uncomputed_tokens = 1
            self._loaded.append(leg)
            self._wake()

        self._loop.after(ends - self._loop.now, arrived)

    def _stepped(self, chunks: list[tuple[VirtualLeg, int]], seconds: float) -> None:
        """End a step: every answer has one more token, and whole prompts have their first."""
        self._steps += 1
        running = len(self._ends)
        self._context += running
        ended = list[VirtualLeg]()
        begun = list[VirtualLeg]()
        while self._ends and self._ends[0][0] == self._steps:
            ended.append(heappop(self._ends)[2])
        for leg, tokens in chunks:
            leg.uncomputed_tokens -= tokens
            self.log.computed_tokens += tokens
            if not leg.uncomputed_tokens:
                self._prefilling.remove(leg)
                begun.append(leg)
        for leg in ended:
            self._context -= leg.prompt_tokens + leg.output_tokens
            self._free(leg)
        for leg in begun:
            if leg.output_tokens == 1:
                self._free(leg)
            else:
                self._context += leg.prompt_tokens + 1
                heappush(self._ends, (self._steps + leg.output_tokens - 1, next(self._order), leg))
        self._send_tokens(running, ended, begun, seconds)
        self._step()

    def _send_tokens(
        self, running: int, ended: list[VirtualLeg], begun: list[VirtualLeg], seconds: float
    ) -> None:
        """Deliver the tokens of a step to clients, as soon as the API server gets to it."""
        took = self._api((running + len(begun)) * self.model.api_token_s)

        def deliver() -> None:
            now = self._loop.now
            if running:
                gap = now - self._sent_at if self.model.api_token_s else seconds
                self.log.gaps.append((gap, running))
                self.log.itl_sum_s += gap * running
                self.log.itl_count += running
                self._report_gap(gap)
            self._sent_at = now
            for leg in ended:
                leg.ended(leg)
            for leg in begun:
                leg.first()
                if leg.output_tokens == 1:
                    leg.ended(leg)

        if took:
            self._loop.after(took, deliver)
        else:
            deliver()

    def _free(self, leg: VirtualLeg) -> None:
        """End a leg; its blocks are free unless another engine reads them first."""
        self.log.legs += 1
        if not leg.holds_blocks:
            self._cache.release_blocks(leg.blocks, self._unnamed(leg), leg.answer)
