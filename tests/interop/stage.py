"""A program and its two engines, while they are tried; and what is seen of them."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from interop.peer import Pair
from pdrelay_tools.http_reply import Reply
from pdrelay_tools.local.processes import Child, ProcessGroup
from pdrelay_tools.local.recipe import EngineSpec
from pdrelay_tools.proving.core.answer import Answer, Malformed, differences, read
from pdrelay_tools.proving.core.holdings import read_holdings
from pdrelay_tools.proving.core.question import Question
from pdrelay_tools.proving.core.reply import read_reply
from support.cluster import MODEL_NAME, values

ANSWER_S = 60.0  # for an answer of a tiny model, and for what a program does when an engine dies
REST_S = 90.0  # until engines at rest hold nothing: a lease that nobody ends lasts 30 s
LOOK_S = 0.1
TOLERANCE = 1e-4  # of a logprob, in float32


class Missed(Exception):
    """Something did not come about; the message says what."""


@dataclass
class Stage:
    """What a property is tried on."""

    fleet: ProcessGroup
    url: str
    pair: Pair
    prefill: Child
    start: Callable[[EngineSpec], Child]  # an engine
    serves_alone: bool  # whether an engine answers by itself
    reference: EngineSpec  # one engine without a connector: what it answers is right
    loads: str | None  # what D counts of requests whose KV came; None: tokens by their source
    known: dict[str, Answer]  # of the reference
    seen: dict[str, float] = field(default_factory=dict[str, float])  # what a property leaves for the next one

    def post(self, body: object, path: str = "/v1/completions", *, at: str | None = None) -> httpx.Response:
        """Send a body as it is, or as JSON; to the program, or to an engine."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return httpx.post((at or self.url) + path, content=content, headers=headers, timeout=ANSWER_S, trust_env=False)

    def answer(self, question: Question, *, at: str | None = None) -> Answer:
        """Ask a question; raises Missed with what came in place of an answer."""
        response = self.post(question.body(MODEL_NAME), question.path, at=at)
        try:
            return read_reply(question, Reply(response.status_code, response.content, "", False, 0.0, 0.0))
        except Malformed as exc:
            raise Missed(str(exc)) from exc

    def right_answer(self, question: Question) -> Answer:
        """Ask the reference; each question once."""
        key = repr(question)
        if key not in self.known:
            self.known[key] = self.answer(question, at=self.reference.base_url)
        return self.known[key]

    def whole(self, body: dict[str, object], *, at: str | None = None) -> Answer:
        """Ask for an answer that is not streamed, by a body; raises Missed."""
        response = self.post({"model": MODEL_NAME, "temperature": 0, **body}, at=at)
        if response.status_code != 200:
            raise Missed(f"HTTP {response.status_code}: {response.text[:120]}")
        try:
            return read([response.content])
        except Malformed as exc:
            raise Missed(str(exc)) from exc

    def difference(self, question: Question) -> str:
        """Compare the program's answer with one engine's; empty: they are equal."""
        try:
            ours = self.answer(question)
        except (Missed, httpx.HTTPError) as exc:
            return f"{type(exc).__name__}: {exc}"
        found = differences(ours, self.right_answer(question), TOLERANCE)
        return "; ".join(f"{each.name}: {each.seen}" for each in found)

    @contextmanager
    def stream(self, question: Question) -> Iterator[Iterator[bytes]]:
        """Yield the pieces of a streamed answer."""
        timeout = httpx.Timeout(ANSWER_S)
        body = question.body(MODEL_NAME)
        with httpx.stream("POST", self.url + question.path, json=body, timeout=timeout, trust_env=False) as response:
            yield response.iter_bytes()

    def kill_prefill(self) -> None:
        """End P as a host that loses its power does."""
        self.prefill.signal(signal.SIGKILL)
        self.prefill.wait(10)
        self.fleet.stop(self.prefill)

    def restart_prefill(self) -> None:
        """Start P again at its ports, after its death."""
        self.prefill = self.start(self.pair.prefill)
        self.fleet.wait_ready([self.prefill], timeout_s=300)


def counted(spec: EngineSpec) -> dict[str, float]:
    """Return an engine's counters, all of what it has counted until now."""
    httpx.get(f"{spec.base_url}/is_paused", timeout=ANSWER_S, trust_env=False)  # comes behind all earlier numbers
    return values(_metrics(spec))


def _metrics(spec: EngineSpec) -> str:
    return httpx.get(f"{spec.base_url}/metrics", timeout=ANSWER_S, trust_env=False).text


def holds(spec: EngineSpec) -> str:
    """Say what an engine holds; empty: nothing."""
    found = read_holdings(_metrics(spec))
    return found.beyond(None) if found else "no metrics"


def seconds_until_rest(*specs: EngineSpec) -> float:
    """Wait until engines hold nothing; return how long that took. Raises Missed."""
    return seconds_until(lambda: not any(holds(spec) for spec in specs), REST_S, "the engines hold blocks")


def seconds_until(condition: Callable[[], bool], most: float, otherwise: str) -> float:
    """Wait for a condition of running programs. Raises Missed."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() > begun + most:
            raise Missed(f"{otherwise} after {most:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - begun
