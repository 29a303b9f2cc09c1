"""Clients that leave, and clients that send nonsense: nothing stays held, and every error is the
client's.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from pdrelay_tools.proving.bench import Bench
from pdrelay_tools.proving.check import Check, Seen
from pdrelay_tools.proving.core.finding import Finding, FindingName
from pdrelay_tools.proving.core.question import Question, Shape
from pdrelay_tools.proving.core.reply import Reply, together
from pdrelay_tools.proving.http_server import HttpServer
from pdrelay_tools.proving.services import EnginePairs

_LONG: Final = 200  # tokens of an answer that is not read to its end
_EARLY_S: Final = (0.0, 0.005, 0.02, 0.05, 0.1)
_MANY: Final = 2_000_000_000  # tokens that no engine has room for


async def abandoned_early(bench: Bench) -> Seen:
    """Hang up before the first token, at different times."""
    await asyncio.gather(
        *(bench.leave(_long(bench, 300), after_s=after_s) for after_s in _EARLY_S * 2)
    )
    findings = await bench.compare(bench.prompts.mixed(3, longest=200))
    if not isinstance(bench.service, EnginePairs):
        return Seen(findings)
    # An engine that never saw the request cannot tell the prefill engine; that is what leases are
    # for.
    return Seen(findings, idle_s=bench.limits.lease_s + 5)


async def abandoned_streams(bench: Bench) -> Seen:
    """Hang up at the first token and in the middle of a stream."""
    wanted = (1, 1, 2, 5, 20, 20)
    wait_s = bench.limits.request_s
    left = await asyncio.gather(
        *(bench.leave(_long(bench, 150), after_s=wait_s, after_events=events) for events in wanted)
    )
    findings = [
        Finding(FindingName.NO_ANSWER, f"no first token: {reply.why}")
        for reply in left
        if reply.is_late
    ]
    return Seen(
        together(findings, len(wanted)) + await bench.compare(bench.prompts.mixed(3, longest=200))
    )


def _long(bench: Bench, length: int) -> Question:
    fields = {"ignore_eos": True}
    return Question(
        Shape.IDS,
        bench.prompts.ids(length),
        stream=True,
        max_tokens=_LONG,
        fields=fields,
        logprobs=False,
    )


async def refused(bench: Bench) -> Seen:
    """Ask for more tokens than there is room for: the decode engine refuses what the prefill engine
    has computed.
    """
    asked = [Question(Shape.IDS, bench.prompts.ids(150), max_tokens=_MANY) for _ in range(4)]
    replies = await bench.ask_all(asked, at_once=2)
    findings = [each for reply in replies for each in _of_nonsense("a billion tokens", reply)]
    return Seen(
        together(findings, len(asked)) + await bench.compare(bench.prompts.mixed(3, longest=200))
    )


async def nonsense(bench: Bench) -> Seen:
    """Send bodies that make no sense."""
    fronts = [bench.router] if bench.router is not None else bench.engines
    findings: list[Finding] = []
    for front in fronts:
        for name, body in bodies(bench.facts.name, bench.facts.max_model_len or 2048).items():
            bench.requests += 1
            reply = await front.post("/v1/completions", body, timeout_s=bench.limits.request_s)
            found = _of_nonsense(f"{front.name}, {name}", reply)
            if found and not await _is_vllms_own(bench, reply, body):
                findings += found
    return Seen(
        together(findings, bench.requests)
        + await bench.compare(bench.prompts.mixed(3, longest=200)),
        [f"{len(fronts)} servers, {len(bodies('', 1))} bodies each"],
    )


async def _is_vllms_own(bench: Bench, reply: Reply, body: Mapping[str, object] | bytes) -> bool:
    """Tell whether the reference answers just so: then no connector and no router is at fault."""
    server: object = getattr(bench.reference, "server", None)
    if reply.status is None or not isinstance(server, HttpServer):
        return False
    alone = await server.post("/v1/completions", body, timeout_s=bench.limits.request_s)
    return alone.status == reply.status


def bodies(model: str, longest: int) -> dict[str, Mapping[str, object] | bytes]:
    """Return bodies that every server must refuse, by what is wrong with them."""
    good = {"model": model, "prompt": "a quiet river", "max_tokens": 2}
    deep = b'{"model": "x", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    return {
        "no JSON": b"{not json",
        "a list": b"[1, 2]",
        "an empty body": b"",
        "an unknown model": good | {"model": "no-such-model"},
        "a negative max_tokens": good | {"max_tokens": -1},
        "a prompt of a wrong type": good | {"prompt": {"a": 1}},
        "a temperature of a wrong type": good | {"temperature": "hot"},
        "a negative token id": good | {"prompt": [-1, 5, 6]},
        "deep nesting": deep,
        "a prompt that is too long": good | {"prompt": [25] * (longest + 1)},
        "a regular expression that ends nowhere": good | {"structured_outputs": {"regex": "(((("}},
    }


def _of_nonsense(name: str, reply: Reply) -> list[Finding]:
    if reply.is_late:
        return [Finding(FindingName.NO_ANSWER, f"{name}: {reply.why}")]
    if reply.status == 200 and not reply.why:
        return [Finding(FindingName.BAD_INPUT_ACCEPTED, f"{name}: HTTP 200")]
    if reply.status is None or not 400 <= reply.status < 500:
        return [Finding(FindingName.BAD_INPUT_ERROR, f"{name}: {reply.failure()}")]
    if not _says_why(reply.body):
        shown = reply.body[:100].decode(errors="replace")
        return [
            Finding(
                FindingName.BAD_INPUT_ERROR,
                f"{name}: HTTP {reply.status} without a message: {shown}",
            )
        ]
    return []


class _SaidError(msgspec.Struct):
    message: str = ""


class _SaidFault(msgspec.Struct):
    """An error, in OpenAI's shape or in vLLM's earlier one."""

    error: _SaidError = msgspec.field(default_factory=_SaidError)
    message: str = ""


def _says_why(body: bytes) -> bool:
    try:
        found = msgspec.json.decode(body, type=_SaidFault)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(found.error.message or found.message)


CHECKS = (
    Check(
        "abandoned-early",
        "clients",
        "clients that hang up before the first token",
        abandoned_early,
        20.0,
    ),
    Check(
        "abandoned-streams",
        "clients",
        "clients that hang up in the middle of a stream",
        abandoned_streams,
        20.0,
    ),
    Check(
        "refused",
        "clients",
        "requests that the decode engine refuses after the prefill",
        refused,
        15.0,
    ),
    Check("nonsense", "clients", "bodies that make no sense", nonsense, 15.0),
)
