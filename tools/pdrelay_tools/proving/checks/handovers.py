"""kv_transfer_params that are mixed up, used again, stale or nonsense: never another prompt's
text.
"""

import asyncio
from typing import Final

from pdrelay_tools.proving.bench import Bench, CheckAborted, now
from pdrelay_tools.proving.check import Check, Seen
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.handover import with_transfer
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import Reply, together
from pdrelay_tools.proving.http_server import HttpServer
from pdrelay_tools.proving.peers import Deed
from pdrelay_tools.proving.services import PrefillFailed, new_request_id, new_transfer

_REFILL_S: Final = 60.0  # for using every block of a cache once
_LARGEST_CACHE: Final = 400_000  # tokens that are computed for it


class Offered:
    """A prompt that a prefill engine has computed, and what it offers of it."""

    def __init__(self, bench: Bench, question: Question) -> None:
        self.question = question
        self.request = new_request_id()
        self._transfer = new_transfer()
        self._bench = bench
        self._params: object = None

    async def make(self, prefill: HttpServer) -> "Offered":
        """Have it computed; raises CheckAborted."""
        bench = self._bench
        bench.requests += 1
        try:
            _, handover = await bench.pairs.prefill_leg(
                self.question,
                prefill,
                self.request,
                self._transfer,
                timeout_s=bench.limits.request_s,
            )
        except PrefillFailed as exc:
            raise CheckAborted(f"the prefill leg failed: {exc}") from exc
        self._params = with_transfer(handover, self._transfer)
        return self

    async def take(self, decode: HttpServer, question: Question | None = None) -> Reply:
        """Ask a decode engine with this offer, rightly or with another question."""
        body = (question or self.question).body(self._bench.facts.name) | {
            "kv_transfer_params": self._params
        }
        return await decode.post(
            self.question.path,
            body,
            timeout_s=self._bench.limits.request_s,
            request_id=self.request,
        )

    async def leave(self, decode: HttpServer, *, after_s: float) -> Reply:
        """Ask, and hang up."""
        body = self.question.body(self._bench.facts.name) | {"kv_transfer_params": self._params}
        return await decode.leave(
            self.question.path, body, after_s=after_s, request_id=self.request
        )


async def mixed_up(bench: Bench) -> Seen:
    """Give one request the params of another, then use them rightly."""
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode[0]
    findings: list[Finding] = []
    sizes = ((70, 70), (70, 200), (200, 70))
    for mine, other in sizes:
        offer = await Offered(bench, _ids(bench, mine)).make(prefill)
        wrong = _ids(bench, other)
        findings += await bench.judge([wrong], [await offer.take(decode, wrong)], may_fail=True)
        findings += await bench.judge([offer.question], [await offer.take(decode)], may_fail=True)
    return Seen(together(findings, 2 * len(sizes)))


async def used_twice(bench: Bench) -> Seen:
    """Use the same params twice, and twice at the same time."""
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode
    offer = await Offered(bench, _ids(bench, 150)).make(prefill)
    replies = [await offer.take(decode[0]), await offer.take(decode[-1])]
    other = await Offered(bench, _ids(bench, 150)).make(prefill)
    replies += await asyncio.gather(other.take(decode[0]), other.take(decode[-1]))
    asked = [offer.question, offer.question, other.question, other.question]
    return Seen(await bench.judge(asked, replies, may_fail=True))


async def stale(bench: Bench) -> Seen:
    """Use params after the lease is over and the prefill engine has other prompts in those
    blocks.
    """
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode[0]
    offers = [
        await Offered(bench, _ids(bench, 100 + 60 * number)).make(prefill) for number in range(4)
    ]
    await bench.right_answers([offer.question for offer in offers])
    await asyncio.sleep(bench.past_lease_s)
    note = await refill(bench, prefill)
    replies = [await offer.take(decode) for offer in offers]
    return Seen(
        await bench.judge([offer.question for offer in offers], replies, may_fail=True), [note]
    )


async def unclaimed(bench: Bench) -> Seen:
    """Have a prompt computed that no decode engine asks for: its blocks are back when the lease is
    over.
    """
    await Offered(bench, _ids(bench, 300)).make(bench.pairs.prefill[0])
    return Seen(
        notes=["how long a prompt is kept that no decode engine asks for"],
        idle_s=bench.limits.lease_s + 5,
    )


async def malformed(bench: Bench) -> Seen:
    """Give a decode engine params that make no sense. vLLM's own connector was seen to die of the
    first of them.
    """
    decode = bench.pairs.decode[0]
    asked = [_ids(bench, 70) for _ in MALFORMED]
    await bench.right_answers(asked)
    replies: list[Reply] = []
    for question, params in zip(asked, MALFORMED, strict=True):
        bench.requests += 1
        body = question.body(bench.facts.name) | {"kv_transfer_params": params}
        replies.append(await decode.post(question.path, body, timeout_s=bench.limits.request_s))
    findings = await bench.judge(asked, replies, may_fail=True)
    alive = await decode.get("/health", timeout_s=10.0)
    if not alive.failure():
        return Seen(findings)
    await bench.peers.do("decode", Deed.RESTART)
    return Seen(
        [
            *findings,
            Finding(
                FindingName.ENGINE_DOWN,
                f"{decode.name} died of kv_transfer_params: {alive.failure()}",
            ),
        ]
    )


MALFORMED: Final[tuple[dict[str, object], ...]] = (
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_block_ids": "nonsense", "remote_engine_id": 7},
    {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x"},
    {
        "do_remote_prefill": True,
        "remote_engine_id": "gone",
        "remote_request_id": "gone",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_block_ids": [[1, 2, 3]],
        "remote_num_tokens": 70,
    },
)


async def refill(bench: Bench, server: HttpServer) -> str:
    """Have an engine use every block of its cache for other prompts, and return how far that
    went.
    """
    seen = await bench.holdings(server)
    size = (seen.blocks or 0) * (seen.block_size or bench.block_size) if seen is not None else 0
    wanted = min(size or 16_000, _LARGEST_CACHE)
    length = max(2, (bench.facts.max_model_len or 2048) - 8)
    end = now() + _REFILL_S
    done = 0
    while done < wanted and now() < end:
        fields = {"ignore_eos": True}
        asked = [
            Question(
                Shape.IDS, bench.prompts.ids(length), max_tokens=1, logprobs=False, fields=fields
            )
            for _ in range(4)
        ]
        await asyncio.gather(
            *(
                server.post(
                    each.path, each.body(bench.facts.name), timeout_s=bench.limits.request_s
                )
                for each in asked
            )
        )
        done += 4 * length
    room = f"room for {size}" if size else "an unknown size"
    return f"{server.name} then computed {done} tokens of other prompts; its cache has {room}."


def _ids(bench: Bench, length: int) -> Question:
    return Question(Shape.IDS, bench.prompts.ids(min(length, bench.longest)))


CHECKS = (
    Check("mixed-up", "handovers", "params of another request", mixed_up, 15.0, is_direct=True),
    Check(
        "used-twice", "handovers", "params that are used twice", used_twice, 15.0, is_direct=True
    ),
    Check(
        "unclaimed",
        "handovers",
        "a prompt that no decode engine asks for",
        unclaimed,
        45.0,
        is_direct=True,
    ),
    Check(
        "stale",
        "handovers",
        "params whose blocks have other prompts by now",
        stale,
        90.0,
        is_direct=True,
    ),
    Check(
        "malformed",
        "handovers",
        "params that make no sense, of which a decode engine may die",
        malformed,
        15.0,
        deeds=(("decode", Deed.RESTART),),
        is_direct=True,
    ),
)
