"""Frozen, killed and restarted engines: no wrong text, no missing answer, no lost block."""

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Self

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.http_server import HttpServer
from pdrelay_tools.proving.bench import Bench, CheckAborted, now
from pdrelay_tools.proving.check import Check, CheckResult, CheckRun
from pdrelay_tools.proving.checks.handovers import ComputedPrompt, refill
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.idleness import is_strand, seconds_until_free
from pdrelay_tools.proving.peers import Deed

_SENT_S: Final = 0.5  # until a leg has reached its engine
_BUSY_S: Final = 3.0  # for which a decode engine is given work
_RESTART_S: Final = 300.0
_FROZEN_S: Final = 5.0


async def _computed_prompts(bench: Bench, count: int) -> list[ComputedPrompt]:
    """Have the first prefill engine compute prompts, and the reference answer them."""
    lengths = [bench.block_size * (2 + number) + 7 * number for number in range(count)]
    questions = [
        Question(Shape.IDS, bench.prompts.ids(min(length, bench.longest))) for length in lengths
    ]
    await bench.right_answers(questions)
    return [
        await ComputedPrompt(bench, question).compute(bench.pairs.prefill[0])
        for question in questions
    ]


async def _judge(
    bench: Bench, offers: Sequence[ComputedPrompt], replies: Sequence[Reply]
) -> list[Finding]:
    return await bench.judge([offer.question for offer in offers], replies, may_fail=True)


@asynccontextmanager
async def _frozen(bench: Bench, role: str) -> AsyncGenerator[None]:
    """Freeze the first engine of a role, and thaw it, also if freezing seemed to fail."""
    try:
        await bench.peers.do(role, Deed.FREEZE)
        yield
    finally:
        await _to_its_end(bench.peers.do(role, Deed.THAW))


@asynccontextmanager
async def _killed(bench: Bench, role: str) -> AsyncGenerator[None]:
    """Kill the first engine of a role; a run that is ended in the block starts it again."""
    try:
        await _to_its_end(bench.peers.do(role, Deed.KILL))
        yield
    except asyncio.CancelledError:
        await _to_its_end(bench.peers.do(role, Deed.RESTART))
        raise


async def _to_its_end(deed: Coroutine[object, object, None]) -> None:
    """Await it also if the run is cancelled meanwhile, and again: else an engine stays as it is."""
    task = asyncio.ensure_future(deed)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


async def decode_frozen(bench: Bench) -> CheckResult:
    """Freeze the decode engine between the legs, until the prefill engine reuses the blocks."""
    decode = bench.pairs.decode[0]
    offers = await _computed_prompts(bench, 8)
    async with _frozen(bench, "decode"):
        answering = [asyncio.create_task(offer.ask(decode)) for offer in offers]
        await asyncio.sleep(bench.past_lease_s)
        note = await refill(bench, bench.pairs.prefill[0])
    return CheckResult(await _judge(bench, offers, await asyncio.gather(*answering)), [note])


async def decode_frozen_left(bench: Bench) -> CheckResult:
    """Freeze the decode engine between the legs; the clients hang up meanwhile."""
    decode = bench.pairs.decode[0]
    offers = await _computed_prompts(bench, 4)
    async with _frozen(bench, "decode"):
        await asyncio.gather(*(offer.leave(decode, after_s=_SENT_S) for offer in offers))
    return CheckResult(
        await bench.compare(bench.prompts.mixed(3, longest=200)), idle_s=bench.limits.lease_s + 5
    )


async def decode_busy_left(bench: Bench) -> CheckResult:
    """Clients hang up while their requests wait in the decode engine's queue."""
    decode = bench.pairs.decode[0]
    work = await _Work.measured(bench, decode)
    offers = await _computed_prompts(bench, 4)
    async with work.waiting() as note:
        await asyncio.gather(*(offer.leave(decode, after_s=_SENT_S) for offer in offers))
    return CheckResult(await bench.compare(bench.prompts.mixed(3, longest=200)), [note])


async def decode_killed(bench: Bench) -> CheckResult:
    """Kill the decode engine while requests wait in its queue: the prefill blocks must get free."""
    decode = bench.pairs.decode[0]
    work = await _Work.measured(bench, decode)
    began = now()
    offers = await _computed_prompts(bench, 6)
    async with work.waiting() as note:
        answering = [asyncio.create_task(offer.ask(decode)) for offer in offers]
        await asyncio.sleep(_SENT_S)
        async with _killed(bench, "decode"):
            killed = now()
            findings = await _judge(bench, offers, await asyncio.gather(*answering))
            held_s = await seconds_until_free(bench, bench.pairs.prefill[0], killed)
    if held_s > bench.limits.idle_s:
        prefill = bench.pairs.prefill[0].name
        name = (
            FindingName.BLOCKS_STRANDED
            if is_strand(bench, prefill, now() - began)
            else FindingName.BLOCKS_HELD
        )
        findings.append(
            Finding(
                name,
                f"{prefill} held its blocks for {held_s:.1f} s after the decode engine was dead",
            )
        )
    await _restart(bench, "decode", decode)
    findings += await bench.compare(bench.prompts.mixed(3, longest=200))
    return CheckResult(
        findings, [note, f"the prefill engine's blocks were back {held_s:.1f} s after the kill"]
    )


async def prefill_frozen(bench: Bench) -> CheckResult:
    """Freeze the prefill engine for some seconds while the decode engine wants its blocks."""
    decode = bench.pairs.decode[0]
    offers = await _computed_prompts(bench, 4)
    async with _frozen(bench, "prefill"):
        answering = [asyncio.create_task(offer.ask(decode)) for offer in offers]
        await asyncio.sleep(min(_FROZEN_S, bench.limits.lease_s / 2))
    return CheckResult(await _judge(bench, offers, await asyncio.gather(*answering)))


async def prefill_killed(bench: Bench) -> CheckResult:
    """Kill the prefill engine between the legs, and start it again."""
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode[0]
    offers = await _computed_prompts(bench, 4)
    async with _killed(bench, "prefill"):
        replies = await asyncio.gather(*(offer.ask(decode) for offer in offers))
        findings = await _judge(bench, offers, replies)
    await _restart(bench, "prefill", prefill)
    return CheckResult(findings + await bench.compare(bench.prompts.mixed(3, longest=200)))


@dataclass(frozen=True, slots=True)
class _Work:
    """Long prompts that keep a decode engine busy, and the measured seconds of one.

    They are measured before any lease begins: one may end while a slow engine computes a prompt.
    """

    bench: Bench
    decode: HttpServer
    length: int  # tokens
    once: float  # seconds

    @classmethod
    async def measured(cls, bench: Bench, decode: HttpServer) -> Self:
        length = max(2, (bench.facts.max_model_len or 2048) - 8)
        began = now()
        await cls(bench, decode, length, 0.0).do()
        return cls(bench, decode, length, max(0.001, now() - began))

    async def do(self) -> None:
        """Have one prompt computed."""
        question = Question(
            Shape.IDS, self.bench.prompts.ids(self.length), max_tokens=1, logprobs=False
        )
        body = question.body(self.bench.facts.name)
        await self.decode.post(question.path, body, timeout_s=self.bench.limits.request_s)

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[str]:
        """Keep the engine busy for some seconds: requests sent in the block wait in its queue."""
        count = min(64, math.ceil(min(_BUSY_S, self.bench.limits.lease_s / 2) / self.once))
        working = [asyncio.create_task(self.do()) for _ in range(count)]
        try:
            await asyncio.sleep(min(0.2, self.once))
            yield (
                f"{self.decode.name} was busy with {count} prompts of {self.length} tokens, "
                f"{self.once:.2f} s each"
            )
            await asyncio.gather(*working)
        finally:
            for task in working:  # of a check that has failed, or was ended
                task.cancel()


async def _restart(bench: Bench, role: str, server: HttpServer) -> None:
    """Start an engine again and wait until it serves; raises CheckAborted."""
    await _to_its_end(bench.peers.do(role, Deed.RESTART))
    end = now() + _RESTART_S
    while (reply := await server.get("/health", timeout_s=5.0)).failure():
        if now() > end:
            raise CheckAborted(
                f"{server.name} does not serve {_RESTART_S:g} s after its restart: "
                f"{reply.failure()}"
            )
        await asyncio.sleep(0.5)
    bench.pairs.forget()
    if (holdings := await bench.holdings(server)) is not None:
        bench.usual[server.name] = holdings


_FREEZE_D: Final = (("decode", Deed.FREEZE), ("decode", Deed.THAW))
_FREEZE_P: Final = (("prefill", Deed.FREEZE), ("prefill", Deed.THAW))
_KILL_D: Final = (("decode", Deed.KILL), ("decode", Deed.RESTART))
_KILL_P: Final = (("prefill", Deed.KILL), ("prefill", Deed.RESTART))


def _direct(
    name: str, about: str, run: CheckRun, seconds: float, deeds: Sequence[tuple[str, Deed]] = ()
) -> Check:
    return Check(name, "faults", about, run, seconds, tuple(deeds), is_direct=True)


CHECKS = (
    _direct("busy-left", "clients that leave a busy decode engine's queue", decode_busy_left, 30.0),
    _direct(
        "decode-frozen",
        "a decode engine that sleeps past its leases",
        decode_frozen,
        90.0,
        _FREEZE_D,
    ),
    _direct(
        "decode-frozen-left",
        "clients that leave an engine that sleeps",
        decode_frozen_left,
        45.0,
        _FREEZE_D,
    ),
    _direct(
        "prefill-frozen", "a prefill engine that sleeps for 5 s", prefill_frozen, 30.0, _FREEZE_P
    ),
    _direct(
        "decode-killed", "a decode engine that dies with a queue", decode_killed, 60.0, _KILL_D
    ),
    _direct(
        "prefill-killed",
        "a prefill engine that dies between the legs",
        prefill_killed,
        60.0,
        _KILL_P,
    ),
)
