"""Checks engines before traffic: health, fit, and a request through each, whose KV must move."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from pdrelay_proxy.building.engines import EngineSide, Fabric, build_engines
from pdrelay_proxy.core.fleet.fleet_warnings import fleet_warnings, pair_differences
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.peer_metrics import read_failures, read_moved
from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features import pairs_within
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.settings import Settings
from pdrelay_tools.http_reply import Reply
from pdrelay_tools.http_server import HttpServer, open_transport
from pdrelay_tools.local.first_request import METRICS_WAIT_S
from pdrelay_tools.proving.core.answer import Malformed
from pdrelay_tools.proving.core.holdings import Holdings, read_holdings
from pdrelay_tools.proving.core.question import Prompts, Question, Shape
from pdrelay_tools.proving.core.readiness import (
    KvCounters,
    MemberPair,
    PairCounters,
    ReadinessLine,
    Sign,
    choose_pairs,
    common_model,
    engine_line,
    failure_with,
    moved_between,
    prompt_length,
)
from pdrelay_tools.proving.core.reply import read_reply
from pdrelay_tools.proving.services import EnginePairs
from pdrelay_tools.served_by import metric_total

_ANSWER_SHARE: Final = 0.3  # of all seconds, for one answer about an engine
_EXAMINE_SHARE: Final = 0.5  # until then an engine must have answered all of them
_REQUEST_SHARE: Final = 0.7  # until then the requests must have ended
_POLL_S: Final = 0.1  # an engine publishes what it counts a moment after its answer
_FEW_TOKENS: Final = 4  # of an answer
_MORE_TIME: Final = 6.0  # times the seconds that were not enough: a minute for ten seconds
_LEAST_S: Final = 0.05  # for any request


@dataclass(frozen=True, slots=True)
class _EngineMetrics:
    """An engine's metrics at a moment."""

    counters: KvCounters
    failures: dict[str, str]  # why it loads no KV, by the other engine's id
    holdings: Holdings | None
    is_read: bool  # they were shown in time


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request that was sent through a pair of engines."""

    pair: MemberPair
    question: Question
    reply: Reply

    @property
    def about(self) -> str:
        """Names both engines."""
        return " to ".join(member.instance.id for member in self.pair)


async def examine(settings: Settings, *, seconds: float) -> AsyncGenerator[ReadinessLine]:
    """Yield each finding at once; all within so many seconds.

    Raises:
        AddressError, AlreadyKnown, ConfigError: as ``build_engines`` says.
    """
    looking = replace(settings, health_check_timeout_s=seconds * _ANSWER_SHARE)
    engines = build_engines(looking, Fabric(), pairs_within(looking))
    check = _ReadinessCheck(engines, time.monotonic(), seconds)
    members = engines.registry.members()
    lines = await asyncio.gather(*map(check.examine_engine, members))
    for line in lines:
        yield line
    alive = [member for member, line in zip(members, lines, strict=True) if line.sign is Sign.OK]
    for warning in fleet_warnings(engines.registry):
        yield ReadinessLine(Sign.FAILED, "engines", warning.text)
    for (decode, prefill), reason in pair_differences(alive).items():
        yield ReadinessLine(
            Sign.FAILED, f"{decode} with {prefill}", f"they share no request: {reason}"
        )
    slow = [
        member.instance.role
        for member, line in zip(members, lines, strict=True)
        if line.is_unfinished
    ]
    async for line in check.exchange_kv(_first_ranks(alive), slow=slow):
        yield line


class _ReadinessCheck:
    """One run."""

    def __init__(self, engines: EngineSide, began: float, seconds: float) -> None:
        self._engines = engines
        self._began = began
        self._seconds = seconds

    def _seconds_left(self, share: float = 1.0) -> float:
        """Return the seconds until that share of the time is over."""
        return max(_LEAST_S, self._began + self._seconds * share - time.monotonic())

    def _unfinished(self, about: str, text: str) -> ReadinessLine:
        """Return a finding that is unknown for lack of time: a slow or busy engine may be well."""
        more = (
            f"that is no proof of a fault, so allow more time (--seconds "
            f"{self._seconds * _MORE_TIME:g})"
        )
        return ReadinessLine(Sign.UNKNOWN, about, f"{text}: {more}", is_unfinished=True)

    async def examine_engine(self, member: Member) -> ReadinessLine:
        """Probe an engine, and learn its facts into the registry."""
        instance = member.instance
        has_key = self._engines.outbound.key_of(instance.pool) is not None
        try:
            async with FairTimeout(self._seconds_left(_EXAMINE_SHARE)):
                self._engines.registry.learn(
                    instance.id, await self._engines.checks.probe(instance)
                )
                # it is healthy even if it shows no metrics
                with suppress(ProbeFailed):
                    numbers = await self._engines.checks.numbers(instance)
                    self._engines.registry.learn(instance.id, numbers.facts)
        except ProbeFailed as sick:
            return ReadinessLine(Sign.FAILED, instance.id, f"{instance.address.url} {sick}")
        except TimeoutError:
            text = (
                f"{instance.address.url} has not said all of itself within "
                f"{self._seconds * _EXAMINE_SHARE:g} s"
            )
            return self._unfinished(instance.id, text)
        return engine_line(member, has_key=has_key)

    async def exchange_kv(
        self, members: Sequence[Member], *, slow: Sequence[Role]
    ) -> AsyncGenerator[ReadinessLine]:
        """Send a request through each pair, and check by the counters that its KV moved.

        ``slow``: roles of engines that did not answer in time what they are.
        """
        pairs = choose_pairs(members)
        for member in members:
            if any(member in pair for pair in pairs):
                continue
            name = member.instance.id
            text = "it exchanged no KV: no engine of the other role that answers"
            if any(role is not member.instance.role for role in slow):
                yield self._unfinished(name, f"{text} in time fits it")
            else:
                yield ReadinessLine(Sign.FAILED, name, f"{text} fits it")
        if not pairs:
            return
        before = await self._read_all(pairs)
        sizes = [
            metrics.holdings.block_size
            for metrics in before.values()
            if metrics.holdings and metrics.holdings.block_size
        ]
        exchanges = await self._ask_all(pairs, prompt_length(sizes))
        counts = Counter(
            exchange.pair[1].instance.id for exchange in exchanges if not exchange.reply.failure()
        )
        waiting = list(exchanges)
        patience_s = min(METRICS_WAIT_S, self._seconds_left() - 2 * _POLL_S)
        is_cut = patience_s < METRICS_WAIT_S / 2
        deadline = time.monotonic() + patience_s
        while True:
            is_last = time.monotonic() >= deadline
            now = await self._read_all([exchange.pair for exchange in waiting])
            uncounted = list[_Exchange]()
            for exchange in waiting:
                requests = counts[exchange.pair[1].instance.id]
                line = self._judge(exchange, before, now, requests, is_last=is_last, is_cut=is_cut)
                if line is None:
                    uncounted.append(exchange)
                else:
                    yield line
            if not uncounted:
                return
            waiting = uncounted
            await asyncio.sleep(_POLL_S)

    async def _ask_all(self, pairs: Sequence[MemberPair], length: int) -> Sequence[_Exchange]:
        """Send one request through each pair; pairs that share an engine wait for each other."""
        tls = self._engines.tls
        transport = open_transport(tls.context)
        prompts = Prompts(random.SystemRandom())
        waiting = Counter(member.instance.id for pair in pairs for member in pair)
        locks = {name: asyncio.Lock() for name in waiting}

        def server(member: Member) -> HttpServer:
            instance = member.instance
            key = self._engines.outbound.key_of(instance.pool)
            return HttpServer(
                instance.id, instance.address.url, transport, key, server_name=tls.server_name
            )

        async def send_to(pair: MemberPair) -> _Exchange:
            prefill, decode = map(server, pair)
            model = common_model(pair[0].facts, pair[1].facts) or ""
            question = Question(
                Shape.IDS, prompts.ids(length), max_tokens=_FEW_TOKENS, logprobs=False
            )
            service = EnginePairs([prefill], [decode], model)
            names = [member.instance.id for member in pair]
            # All take the lock of a prefill engine first, so that no two wait for each other.
            async with locks[names[0]], locks[names[1]]:
                # a hung request leaves half of the time to those behind it
                others_wait = any(waiting[name] > 1 for name in names)
                timeout_s = self._seconds_left(_REQUEST_SHARE) / (2 if others_wait else 1)
                reply = await service.ask_pair(
                    question, prefill, decode, timeout_s=round(timeout_s, 2)
                )
                waiting.subtract(names)
            return _Exchange(pair, question, reply)

        async with transport:
            return await asyncio.gather(*map(send_to, pairs))

    async def _read_all(self, pairs: Sequence[MemberPair]) -> dict[InstanceId, _EngineMetrics]:
        """Read the metrics of all engines of these pairs."""
        members = {member.instance.id: member for pair in pairs for member in pair}
        shown = await asyncio.gather(*map(self._read, members.values()))
        return dict(zip(members, shown, strict=True))

    async def _read(self, member: Member) -> _EngineMetrics:
        text = b""
        is_read = False
        with suppress(ProbeFailed, TimeoutError):
            async with asyncio.timeout(self._seconds_left()):
                text = await self._engines.checks.metrics(member.instance)
                is_read = True
        failures = {
            peer: trouble.why or str(trouble.reason)
            for peer, trouble in read_failures(text).items()
        }
        holdings = read_holdings(text.decode(errors="replace"))
        loaded = None if holdings is None else holdings.loaded
        counters = KvCounters(read_moved(text), metric_total(text), loaded)
        return _EngineMetrics(counters, failures, holdings, is_read)

    def _judge(
        self,
        exchange: _Exchange,
        before: Mapping[InstanceId, _EngineMetrics],
        now: Mapping[InstanceId, _EngineMetrics],
        requests: int,
        *,
        is_last: bool,
        is_cut: bool,
    ) -> ReadinessLine | None:
        """Return the finding of a request; None: its engines have not counted it yet.

        ``is_cut``: there was too little time for engines to publish their counters.
        """
        prefill, decode = exchange.pair
        reason = failure_with(now[decode.instance.id].failures, prefill.facts.engine_id)
        if exchange.reply.is_late and not reason:  # an engine may say later why it loads nothing
            return self._unfinished(exchange.about, exchange.reply.reason) if is_last else None
        failure = exchange.reply.failure() or _malformed(exchange)
        if failure:
            text = f"the request failed: {failure}{f' ({reason})' if reason else ''}"
            return ReadinessLine(Sign.FAILED, exchange.about, text)
        readings = [
            metrics[member.instance.id] for member in (prefill, decode) for metrics in (before, now)
        ]
        if not reason and not all(reading.is_read for reading in readings):
            text = "answered, and an engine has not shown in time what it counts"
            return self._unfinished(exchange.about, text) if is_last else None
        counters = PairCounters(*(reading.counters for reading in readings))
        tokens = len(exchange.question.prompt)
        moved = moved_between(exchange.pair, counters, tokens=tokens, requests=requests)
        if moved:
            text = f"{moved} moved, answered in {exchange.reply.seconds * 1000:.0f} ms"
            return ReadinessLine(Sign.OK, exchange.about, text)
        # a counter that is missing now stays missing
        has_metrics = all(now[member.instance.id].holdings is not None for member in exchange.pair)
        if not reason and not is_last and not (moved is None and has_metrics):
            return None
        if moved is None:
            text = (
                "answered, and neither engine counts what moves: whether KV moved cannot be known"
            )
            return ReadinessLine(Sign.UNKNOWN, exchange.about, text)
        if not reason and is_cut:
            return self._unfinished(
                exchange.about,
                "answered, and no engine had counted what moved when the time was over",
            )
        text = f"answered, and no KV moved: {decode.instance.id} computed the prompt itself"
        return ReadinessLine(
            Sign.FAILED,
            exchange.about,
            f"{text}, because {reason}" if reason else f"{text}; its log says why",
        )


def _malformed(exchange: _Exchange) -> str:
    try:
        read_reply(exchange.question, exchange.reply)
    except Malformed as exc:
        return str(exc)
    return ""


def _first_ranks(members: Sequence[Member]) -> Sequence[Member]:
    """Return the first data-parallel rank of each engine: ranks share address and secret."""
    of_engine = groupby(
        members, key=lambda member: (member.instance.role is Role.PREFILL, member.instance.address)
    )
    return [next(ranks) for _, ranks in of_engine]
