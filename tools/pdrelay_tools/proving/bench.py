"""The bench that every check gets: servers under test, a reference, new prompts, comparisons."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.http_server import HttpServer
from pdrelay_tools.proving.core.answer import SMALLEST_TOLERANCE, Answer, Malformed, self_difference
from pdrelay_tools.proving.core.cards import ModelFacts
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.holdings import Holdings, read_holdings
from pdrelay_tools.proving.core.latencies import Latencies
from pdrelay_tools.proving.core.question import Prompts, Question
from pdrelay_tools.proving.core.reply import findings_of, is_uncompared, read_reply, together
from pdrelay_tools.proving.peers import Peers
from pdrelay_tools.proving.services import EnginePairs, Service, SingleServer

LARGEST_TOLERANCE: Final = 0.5  # of a logprob; beyond it a comparison proves nothing
_SAFETY: Final = 4.0  # the few questions of calibrate() do not show the largest difference
_SLOW: Final = 10.0  # times the reference: more than concurrent requests explain
_METRICS_S: Final = 10.0
_REFERENCE_AT_ONCE: Final = 4
_T = TypeVar("_T")


class CheckSkipped(Exception):
    """What the check needs is missing; the message says what."""


class CheckAborted(Exception):
    """The check could not be done; the message says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the suite waits."""

    request_s: float = 60.0  # for an answer
    idle_s: float = 10.0  # for blocks after the last answer
    lease_s: float = 30.0  # kv_lease_duration of the prefill engines
    seconds: float = 600.0  # for the whole run


@dataclass
class Bench:
    """The state of one run, which its checks share."""

    service: Service
    reference: SingleServer | None
    router: HttpServer | None
    prefill: Sequence[HttpServer]
    decode: Sequence[HttpServer]
    facts: ModelFacts
    block_size: int
    limits: Limits
    peers: Peers
    prompts: Prompts
    tolerance: float = SMALLEST_TOLERANCE
    requests: int = 0  # sent to the service
    loads: list[Latencies] = field(default_factory=list[Latencies])
    # what engines hold at rest
    usual: dict[str, Holdings] = field(default_factory=dict[str, Holdings])
    down: str = ""  # which engine is down, and since when: further checks are skipped
    uncompared: int = 0  # answers to questions that the reference did not answer
    unanswered: str = ""  # the latest of these questions, and the reference's error
    _right: dict[str, Answer | None] = field(default_factory=dict[str, Answer | None])
    # by the reference, for an answer
    _took_s: dict[str, float] = field(default_factory=dict[str, float])
    _refused: set[str] = field(default_factory=set[str])

    @property
    def engines(self) -> list[HttpServer]:
        """All engines under test."""
        return [*self.prefill, *self.decode]

    @property
    def pairs(self) -> EnginePairs:
        """The engines, between which we are the router; raises CheckSkipped."""
        if not isinstance(self.service, EnginePairs):
            raise CheckSkipped(
                "it needs the engines themselves (--prefill, --decode), not a router in front of "
                "them"
            )
        return self.service

    @property
    def past_lease_s(self) -> float:
        """Seconds after which a lease without renewals has ended."""
        return 1.1 * self.limits.lease_s

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(2, min(1500, (self.facts.max_model_len or 2048) - 64))

    async def ask(self, question: Question) -> Reply:
        """Ask the service."""
        self.requests += 1
        return await self.service.ask(question, timeout_s=self.limits.request_s)

    async def leave(
        self, question: Question, *, after_s: float, after_events: int | None = None
    ) -> Reply:
        """Ask the service and hang up."""
        self.requests += 1
        return await self.service.leave(
            question, timeout_s=self.limits.request_s, after_s=after_s, after_events=after_events
        )

    async def ask_all(self, questions: Sequence[Question], *, most: int) -> list[Reply]:
        """Ask the service many questions, so many at a time."""
        return await at_once(most, self.ask, questions)

    async def right_answer(self, question: Question) -> Answer | None:
        """Return the reference's answer, which is asked once; None: none (see ``unanswered``)."""
        if self.reference is None:
            return None
        key = repr(question)
        if key not in self._right:
            reply = await self.reference.ask(question, timeout_s=self.limits.request_s)
            self._took_s[key] = reply.seconds
            try:
                self._right[key] = read_reply(question, reply)
            except Malformed as exc:
                self._right[key] = None
                self.unanswered = f"{question}: {exc}"
                if reply.is_refusal:
                    self._refused.add(key)
        return self._right[key]

    def is_refused(self, question: Question) -> bool:
        """Tell whether the reference refused a question as not supported."""
        return repr(question) in self._refused

    async def right_answers(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Return the reference's answers to many questions."""
        return await at_once(_REFERENCE_AT_ONCE, self.right_answer, questions)

    async def compare(
        self, questions: Sequence[Question], *, most: int = 1, may_fail: bool = False
    ) -> list[Finding]:
        """Ask the service and the reference, and return what differs; ``most``: at a time."""
        replies = await self.ask_all(questions, most=most)
        return await self.judge(questions, replies, may_fail=may_fail)

    async def judge(
        self, questions: Sequence[Question], replies: Sequence[Reply], *, may_fail: bool = False
    ) -> list[Finding]:
        """Compare replies with the reference's answers; ``uncompared`` counts those without one.

        ``may_fail``: an error is as good as the right answer.
        """
        right = await self.right_answers(questions)
        findings = list[Finding]()
        for question, reply, answer in zip(questions, replies, right, strict=True):
            if self.reference is not None:
                self.uncompared += is_uncompared(question, reply, answer)
            findings += findings_of(question, reply, answer, self.tolerance, may_fail=may_fail)
            if not may_fail:
                findings += self.slow(f"{question}", reply, self._took_s.get(repr(question)))
        return together(findings, len(questions))

    def slow(self, subject: str, reply: Reply, reference_s: float | None) -> list[Finding]:
        """Return a finding if an answer waited for the end of a lease.

        ``reference_s``: seconds of the reference's answer.
        """
        if (
            reference_s is None
            or reply.failure()
            or reply.seconds < max(self.limits.lease_s, _SLOW * reference_s)
        ):
            return []
        times = (
            f"{reply.seconds:.1f} s, where the single engine took {reference_s:.1f} s and a lease "
            f"lasts"
        )
        return [Finding(FindingName.SLOW_ANSWER, f"{subject}: {times} {self.limits.lease_s:g} s")]

    async def calibrate(self) -> str:
        """Measure by how much the reference differs from itself; return the result as a sentence.

        The logprobs of vLLM depend on the batch, so the tolerance is that difference, times
        _SAFETY.
        """
        if self.reference is None:
            return "There is no reference: answers are compared with nothing."
        questions = self.prompts.mixed(6, longest=self.longest)
        first = [await _answer(self.reference, question, self.limits) for question in questions]
        again = await asyncio.gather(
            *(_answer(self.reference, question, self.limits) for question in questions)
        )
        worst = max(
            self_difference(earlier, later) for earlier, later in zip(first, again, strict=True)
        )
        self.tolerance = min(LARGEST_TOLERANCE, max(SMALLEST_TOLERANCE, _SAFETY * worst))
        sentence = (
            f"{self.reference.name} differs from itself by {worst:.2g} in a logprob; "
            f"{self.tolerance:.2g} is allowed."
        )
        return sentence + (
            " So much hides wrong KV: its answers are not stable."
            if self.tolerance >= LARGEST_TOLERANCE
            else ""
        )

    async def holdings(self, server: HttpServer) -> Holdings | None:
        """Read what an engine holds; None: its metrics do not say."""
        reply = await server.get("/metrics", timeout_s=_METRICS_S)
        return None if reply.failure() else read_holdings(reply.body.decode(errors="replace"))

    async def loaded(self) -> float | None:
        """Return the prompt tokens that decode engines loaded; None: one does not say."""
        readings = [await self.holdings(server) for server in self.decode]
        counts = [None if reading is None else reading.loaded for reading in readings]
        known_counts = [count for count in counts if count is not None]
        return sum(known_counts) if known_counts and len(known_counts) == len(counts) else None


async def _answer(reference: Service, question: Question, limits: Limits) -> Answer:
    """Ask the reference; raises CheckAborted."""
    try:
        return read_reply(question, await reference.ask(question, timeout_s=limits.request_s))
    except Malformed as exc:
        raise CheckAborted(
            f"the reference {reference.name} does not answer ({question}): {exc}"
        ) from exc


async def at_once(
    most: int, ask: Callable[[Question], Awaitable[_T]], questions: Sequence[Question]
) -> list[_T]:
    """Ask many questions, so many at a time; return the answers in their order."""
    slots = asyncio.Semaphore(most)

    async def in_slot(question: Question) -> _T:
        async with slots:
            return await ask(question)

    return list(await asyncio.gather(*map(in_slot, questions)))


def new_prompts(seed: int) -> Prompts:
    """Return prompts that depend on a seed."""
    return Prompts(random.Random(seed))


def now() -> float:
    """Return the time of the suite, in seconds."""
    return time.monotonic()
