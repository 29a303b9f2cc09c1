"""kv_transfer_params that are mixed up, used twice, stale or malformed: never a wrong text."""

import asyncio
from typing import Final

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.http_server import HttpServer
from pdrelay_tools.proving.bench import Bench, CheckAborted, now
from pdrelay_tools.proving.check import Check, CheckResult
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.handover import with_transfer
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import together
from pdrelay_tools.proving.peers import Deed
from pdrelay_tools.proving.services import PrefillFailed, new_request_id, new_transfer

_REFILL_S: Final = 60.0  # for using every block of a cache once
_LARGEST_CACHE: Final = 400_000  # tokens that are computed for it


class ComputedPrompt:
    """A prompt that a prefill engine has computed, and its kv_transfer_params."""

    def __init__(self, bench: Bench, question: Question) -> None:
        self.question = question
        self.request = new_request_id()
        self._transfer = new_transfer()
        self._bench = bench
        self._params: object = None

    async def compute(self, prefill: HttpServer) -> "ComputedPrompt":
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

    async def ask(self, decode: HttpServer, question: Question | None = None) -> Reply:
        """Send a decode leg with these params, for their own question or a wrong one."""
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
        """Send a decode leg, and hang up."""
        body = self.question.body(self._bench.facts.name) | {"kv_transfer_params": self._params}
        return await decode.leave(
            self.question.path, body, after_s=after_s, request_id=self.request
        )


async def mixed_up(bench: Bench) -> CheckResult:
    """Give one request the params of another, then use them for their own."""
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode[0]
    findings: list[Finding] = []
    sizes = ((70, 70), (70, 200), (200, 70))
    for length, other_length in sizes:
        offer = await ComputedPrompt(bench, _ids(bench, length)).compute(prefill)
        wrong = _ids(bench, other_length)
        findings += await bench.judge([wrong], [await offer.ask(decode, wrong)], may_fail=True)
        findings += await bench.judge([offer.question], [await offer.ask(decode)], may_fail=True)
    return CheckResult(together(findings, 2 * len(sizes)))


async def used_twice(bench: Bench) -> CheckResult:
    """Use the same params twice, and twice at the same time."""
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode
    offer = await ComputedPrompt(bench, _ids(bench, 150)).compute(prefill)
    replies = [await offer.ask(decode[0]), await offer.ask(decode[-1])]
    second_offer = await ComputedPrompt(bench, _ids(bench, 150)).compute(prefill)
    replies += await asyncio.gather(second_offer.ask(decode[0]), second_offer.ask(decode[-1]))
    questions = [offer.question, offer.question, second_offer.question, second_offer.question]
    return CheckResult(await bench.judge(questions, replies, may_fail=True))


async def stale(bench: Bench) -> CheckResult:
    """Use params after the end of the lease, when their blocks hold other prompts."""
    prefill = bench.pairs.prefill[0]
    decode = bench.pairs.decode[0]
    offers = [
        await ComputedPrompt(bench, _ids(bench, 100 + 60 * number)).compute(prefill)
        for number in range(4)
    ]
    await bench.right_answers([offer.question for offer in offers])
    await asyncio.sleep(bench.past_lease_s)
    note = await refill(bench, prefill)
    replies = [await offer.ask(decode) for offer in offers]
    return CheckResult(
        await bench.judge([offer.question for offer in offers], replies, may_fail=True), [note]
    )


async def unclaimed(bench: Bench) -> CheckResult:
    """Have a prompt computed that no decode engine reads: its blocks are free after the lease."""
    await ComputedPrompt(bench, _ids(bench, 300)).compute(bench.pairs.prefill[0])
    return CheckResult(
        notes=["how long a prompt is kept that no decode engine asks for"],
        idle_s=bench.limits.lease_s + 5,
    )


async def malformed(bench: Bench) -> CheckResult:
    """Send malformed params to a decode engine. vLLM's NixlConnector died of the first of them."""
    decode = bench.pairs.decode[0]
    questions = [_ids(bench, 70) for _ in MALFORMED]
    await bench.right_answers(questions)
    replies: list[Reply] = []
    for question, params in zip(questions, MALFORMED, strict=True):
        bench.requests += 1
        body = question.body(bench.facts.name) | {"kv_transfer_params": params}
        replies.append(await decode.post(question.path, body, timeout_s=bench.limits.request_s))
    findings = await bench.judge(questions, replies, may_fail=True)
    alive = await decode.get("/health", timeout_s=10.0)
    if not alive.failure():
        return CheckResult(findings)
    await bench.peers.do("decode", Deed.RESTART)
    return CheckResult(
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
    """Have an engine reuse every block of its cache for other prompts; return a note about it."""
    holdings = await bench.holdings(server)
    size = (
        (holdings.blocks or 0) * (holdings.block_size or bench.block_size)
        if holdings is not None
        else 0
    )
    target = min(size or 16_000, _LARGEST_CACHE)
    length = max(2, (bench.facts.max_model_len or 2048) - 8)
    end = now() + _REFILL_S
    done = 0
    while done < target and now() < end:
        fields = {"ignore_eos": True}
        questions = [
            Question(
                Shape.IDS, bench.prompts.ids(length), max_tokens=1, logprobs=False, fields=fields
            )
            for _ in range(4)
        ]
        await asyncio.gather(
            *(
                server.post(
                    question.path, question.body(bench.facts.name), timeout_s=bench.limits.request_s
                )
                for question in questions
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
