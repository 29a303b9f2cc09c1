"""A simulated engine: vLLM's scheduler, step by step; the seconds of a step are its model's."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp
from random import Random
from typing import Final

from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.kv_cache import CacheEvents, KvCache


class EventLoop:
    """Virtual time: what is due next is done next; what is due at once, in the order it was asked
    for.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due = list[tuple[float, int, Callable[[], None]]]()
        self._order = count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something done later."""
        heappush(self._due, (self.now + seconds, next(self._order), act))

    def run(self) -> None:
        """Do everything that is due, until nothing is."""
        while self._due:
            self.now, _, act = heappop(self._due)
            act()


@dataclass(slots=True, eq=False)
class VirtualLeg:
    """What one engine does of one request."""

    blocks: Sequence[int]  # that the prompt fills
    prompt_tokens: int
    output_tokens: int
    answer: Sequence[int] = ()  # blocks that the answer fills
    source: "tuple[VirtualEngine, VirtualLeg] | None" = (
        None  # who has computed the prompt, and keeps it until it is read
    )
    kept: bool = False  # its blocks stay in use until another engine has read them
    first: Callable[[], None] = lambda: None  # has its first token
    ended: "Callable[[VirtualLeg], None]" = lambda _: None  # it has all its tokens
    cached_tokens: int = 0  # that this engine's own cache had
    computed_tokens: int = 0  # of the prompt
    left: int = 0  # tokens of the prompt that are still to be computed


@dataclass(slots=True)
class EngineLog:
    """What one engine has done."""

    busy_s: float = 0.0
    computed_tokens: int = 0  # of prompts
    legs: int = 0  # that are over
    itl_sum_s: float = 0.0  # seconds that answers waited for their next tokens
    itl_count: int = 0  # tokens that came after the first of their answer
    # seconds, tokens that waited them
    gaps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class VirtualEngine:
    """Runs legs: in each step a token for every answer, and as much of the prompts as
    max_num_batched_tokens allow.
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
        """``stepped``: its answers have got their next tokens so many seconds after the ones
        before.

        ``seed``: of the jitter; ``events``: where its cache publishes what changes (None: nowhere).
        """
        self.log: Final = EngineLog()
        self.waiting: Final = deque[VirtualLeg]()
        self.model: Final = model
        self._block_tokens = block_tokens
        self._loop = loop
        self._told = stepped
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
        self.link_free = 0.0  # the time at which its link has carried all that was asked of it
        self._api_free = 0.0  # the time at which its API server has done all that was asked of it
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
        """Return how many legs it has that it does not compute yet: they wait for room, or for
        their KV.
        """
        return len(self.waiting) + len(self._loaded) + self._reading

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Tell whether an empty engine has room for a request."""
        return -(-(prompt_tokens + output_tokens) // self._block_tokens) <= self._cache.blocks

    def cached(self, names: Sequence[int]) -> int:
        """Return how many of the first of these blocks its cache has."""
        return self._cache.found(names)

    def send(self, leg: VirtualLeg) -> None:
        """Have its API server take a leg, which it queues."""
        model = self.model
        took = self._api(model.api_request_s + leg.prompt_tokens * model.api_prompt_token_s)
        self._loop.after(took + model.leg_s, lambda: self.add(leg))

    def add(self, leg: VirtualLeg) -> None:
        """Queue a leg."""
        self.waiting.append(leg)
        self._wake()

    def _api(self, seconds: float) -> float:
        """Have the API server do something behind what it has to do already; return in how many
        seconds it is done.
        """
        now = self._loop.now
        self._api_free = max(now, self._api_free) + seconds
        return self._api_free - now

    def release(self, leg: VirtualLeg) -> None:
        """Give its blocks back; their content stays until the room is needed."""
        self._cache.give(leg.blocks, self._unnamed(leg), leg.answer)
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
            tokens = min(leg.left, budget)
            budget -= tokens
            seconds += self.model.chunk_s(tokens, leg.prompt_tokens - leg.left)
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
        """Return legs whose prompt is not computed, in order, those included that there is room for
        now.
        """
        if not (self._prefilling or self._loaded or self.waiting):
            return self._prefilling
        tokens = sum(leg.left for leg in self._prefilling)
        most = self.model.max_num_batched_tokens - len(self._ends)
        while tokens < most and len(self._prefilling) + len(self._ends) < self.model.max_num_seqs:
            leg = self._loaded.popleft() if self._loaded else self._admitted()
            if leg is None:
                break
            self._prefilling.append(leg)
            leg.computed_tokens = leg.left
            tokens += leg.left
        return self._prefilling

    def _admitted(self) -> VirtualLeg | None:
        """Return the next leg that can compute; those that must read their KV first begin to read
        it.
        """
        while self.waiting:
            leg = self.waiting[0]
            found = min(
                self._cache.found(leg.blocks), (leg.prompt_tokens - 1) // self._block_tokens
            )
            if not self._cache.take(leg.blocks, self._unnamed(leg)):
                return None
            self.waiting.popleft()
            leg.cached_tokens = found * self._block_tokens
            leg.left = leg.prompt_tokens - leg.cached_tokens
            if leg.source is None:
                return leg
            self._read(leg, *leg.source)
        return None

    def _read(self, leg: VirtualLeg, other: "VirtualEngine", lent: VirtualLeg) -> None:
        """Read what is missing over both engines' links, which carry one transfer after the
        other.
        """
        missing = leg.left * self.model.kv_bytes_per_token
        self._reading += 1
        begins = max(self._loop.now, self.link_free, other.link_free)
        ends = begins + self.model.link_s + missing / self.model.link_bytes_per_s
        self.link_free = other.link_free = ends

        def arrived() -> None:
            other.release(lent)
            self._reading -= 1
            leg.left = 1  # vLLM computes the last token of a prompt, even if it has all KV
            self._loaded.append(leg)
            self._wake()

        self._loop.after(ends - self._loop.now, arrived)

    def _stepped(self, chunks: list[tuple[VirtualLeg, int]], seconds: float) -> None:
        """Hand a token to each answer; the API server has sent all of them at the same time."""
        self._steps += 1
        running = len(self._ends)
        self._context += running
        ended = list[VirtualLeg]()
        begun = list[VirtualLeg]()
        while self._ends and self._ends[0][0] == self._steps:
            ended.append(heappop(self._ends)[2])
        for leg, tokens in chunks:
            leg.left -= tokens
            self.log.computed_tokens += tokens
            if not leg.left:
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
        """Have clients get the tokens of a step that took so many seconds."""
        took = self._api((running + len(begun)) * self.model.api_token_s)

        def sent() -> None:
            now = self._loop.now
            if running:
                gap = now - self._sent_at if self.model.api_token_s else seconds
                self.log.gaps.append((gap, running))
                self.log.itl_sum_s += gap * running
                self.log.itl_count += running
                self._told(gap)
            self._sent_at = now
            for leg in ended:
                leg.ended(leg)
            for leg in begun:
                leg.first()
                if leg.output_tokens == 1:
                    leg.ended(leg)

        if took:
            self._loop.after(took, sent)
        else:
            sent()

    def _free(self, leg: VirtualLeg) -> None:
        """Give the blocks of a leg back that has all its tokens."""
        self.log.legs += 1
        if not leg.kept:
            self._cache.give(leg.blocks, self._unnamed(leg), leg.answer)
