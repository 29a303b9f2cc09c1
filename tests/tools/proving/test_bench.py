"""How long answers took, which the services here say themselves: no clock, and no machine that is busy."""

import json

import pytest

from pdrelay_tools.http_reply import Reply
from pdrelay_tools.proving.bench import Bench, Limits, new_prompts
from pdrelay_tools.proving.checks.equality import boundaries
from pdrelay_tools.proving.checks.load import load
from pdrelay_tools.proving.core.cards import ModelFacts
from pdrelay_tools.proving.core.finding import FindingName
from pdrelay_tools.proving.peers import Peers

BODY = json.dumps({"choices": [{"index": 0, "text": "here", "finish_reason": "stop"}]}).encode()


class Timed:
    """Gives the same right answer to every question; it took so many seconds."""

    def __init__(self, name, seconds):
        self.name = name
        self._seconds = seconds

    async def ask(self, question, *, timeout_s):
        return Reply(200, BODY, "", False, 0.0, self._seconds, (0.0, self._seconds))

    async def leave(self, question, *, timeout_s, after_s, after_events=None):
        raise NotImplementedError


async def seen(check, took_s, reference_s, lease_s):
    bench = Bench(
        Timed("1P1D", took_s),
        Timed("reference", reference_s),
        router=None,
        prefill=(),
        decode=(),
        facts=ModelFacts("sim", (), 2048),
        block_size=16,
        limits=Limits(lease_s=lease_s),
        peers=Peers(),
        prompts=new_prompts(7),
    )
    return await check(bench)


@pytest.mark.parametrize(("check", "count"), [(boundaries, "15 of 15"), (load, "32 of 32")])
async def test_an_answer_that_takes_as_long_as_a_lease_is_found(check, count):
    """It is right: the prefill engine stood still until the lease was over, or the prompt was computed again."""
    (found,) = (await seen(check, took_s=30.0, reference_s=3.0, lease_s=30.0)).findings

    assert found.name is FindingName.SLOW_ANSWER
    assert found.evidence.startswith(count)
    assert "30.0 s, where the single engine took 3.0 s and a lease lasts 30 s" in found.evidence


@pytest.mark.parametrize("check", [boundaries, load])
@pytest.mark.parametrize(("took_s", "reference_s"), [(29.9, 0.1), (30.0, 3.1), (60.0, 6.1)])
async def test_an_answer_of_a_busy_machine_is_none(check, took_s, reference_s):
    """It is shorter than a lease, or the single engine has been slow, too."""
    assert (await seen(check, took_s, reference_s, lease_s=30.0)).findings == []
