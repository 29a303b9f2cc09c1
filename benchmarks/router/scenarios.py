"""What is asked of every router, and how engines behave meanwhile."""

from typing import NamedTuple


class Scenario(NamedTuple):
    """Requests of one kind.

    The fields of the load are those of ``load.Plan``, of the engines ``engines.Options``.
    """

    about: str
    load: dict
    quick: dict  # what is different in a quick run
    engines: dict = {}  # noqa: RUF012 (never changed)
    routers: tuple = ("pdrelay", "vllm-router", "toy")
    seconds: float = 4.0  # a run that is not over by a number of requests


def _paced(connections, tokens, step_s, waves, **more):
    return {
        "connections": connections,
        "tokens": tokens,
        "step_s": step_s,
        "most": connections * waves,
        **more,
    }


ALL = ("pdrelay", "system", "plain", "vllm-router", "toy")
SCENARIOS = {
    "short": Scenario(
        "512 B prompts, 2 tokens, streamed, 32 connections",
        {},
        {"seconds": 1.2},
        routers=(*ALL, "queued"),
    ),
    "nonstream": Scenario(
        "the same, in one piece", {"stream": False}, {"seconds": 1.2}, routers=ALL
    ),
    "chat": Scenario("the same, as chats, streamed", {"chat": True}, {"seconds": 1.2}, routers=ALL),
    "prompt32k": Scenario(
        "32 KiB prompts, 2 tokens, streamed, 32 connections",
        {"prompt": 32 << 10},
        {"seconds": 1.2},
        routers=ALL,
    ),
    "prompt256k": Scenario(
        "256 KiB prompts, 2 tokens, streamed, 32 connections",
        {"prompt": 256 << 10},
        {"seconds": 1.2},
        routers=ALL,
    ),
    "stream200": Scenario(
        "64 streams of 200 tokens, a token every 15 ms",
        _paced(64, 200, 0.015, 3),
        {"most": 64},
        {"step_s": 0.015},
        ALL,
    ),
    "alone200": Scenario(
        "32 streams of 200 tokens, each with a clock of its own, a token every 40 ms",
        {"connections": 32, "tokens": 200, "most": 64},
        {"most": 32, "tokens": 100},
        {"step_s": 0.040, "alone": True},
    ),
    "step256": Scenario(
        "256 streams of 64 tokens, stepping at the same instant every 60 ms",
        _paced(256, 64, 0.060, 2, prompt=4096),
        {"most": 256, "tokens": 32},
        {"step_s": 0.060},
    ),
    "streams1000": Scenario(
        "1,000 streams of 40 tokens, begun at once, a token every 250 ms",
        _paced(1000, 40, 0.250, 1, patience=6.0),
        {"tokens": 12, "patience": 0.0},
        {"step_s": 0.250},
    ),
    "burst32": Scenario(
        "32 requests at once, again when all are answered; 4 KiB prompts that take 30 ms, 16 "
        "tokens, one every 15 ms",
        _paced(32, 16, 0.015, 40, prompt=4096, together=True),
        {"most": 32 * 6},
        {"step_s": 0.015, "prefill_s": 0.030},
    ),
    "ttft32": Scenario(
        "as `burst32`, but each connection asks again as soon as it is answered itself",
        _paced(32, 16, 0.015, 40, prompt=4096),
        {"most": 32 * 6},
        {"step_s": 0.015, "prefill_s": 0.030},
    ),
    "burst256": Scenario(
        "256 requests at once, again when all are answered; 4 KiB prompts that take 200 ms, 16 "
        "tokens, one every 60 ms",
        _paced(256, 16, 0.060, 5, prompt=4096, together=True),
        {"most": 256 * 2},
        {"step_s": 0.060, "prefill_s": 0.200},
    ),
    "ttft256": Scenario(
        "as `burst256`, but each connection asks again as soon as it is answered itself",
        _paced(256, 16, 0.060, 5, prompt=4096),
        {"most": 256 * 2},
        {"step_s": 0.060, "prefill_s": 0.200},
    ),
    "hangups": Scenario(
        "64 streams of 40 tokens, a token every 15 ms; every second client leaves after 5",
        _paced(64, 40, 0.015, 8, hang_after=5, patience=6.0),
        {"most": 64 * 3, "patience": 0.0},
        {"step_s": 0.015},
    ),
    "push": Scenario(
        "512 B prompts, 2 tokens, streamed, 32 connections; prefill engines that push",
        {},
        {"seconds": 1.2},
        {"push": True},
        ("pdrelay",),
    ),
}
IDLE = "idle"
