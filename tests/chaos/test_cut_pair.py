"""One of two decode engines cannot reach one of two prefill engines: requests go round that pair, until it can.

Real engines on two hosts (``support.netns``). Only the way from D0 to P0's side channel is cut, and silently: packets
leave, and nobody takes them. Both engines are well for all others, and so is the other way of every pair.
"""

import subprocess
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import Connector
from support.cluster import base_url, engine_spec, nothing_held, router_command, start_engine, wait_until
from support.legs import plain, prompt_of
from support.netns import DATA, NOBODY, lab_available

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.thorough,  # two hosts, each of which imports vLLM, and five engines: minutes on two cores
]
KEY = {"X-Api-Key": "sesame"}
CUT = ("prefill-0", "decode-0")
GIVES_UP_S = 2.0  # D, for a handshake and for a transfer
TOKENS = 8
ROUTER = (
    *("--engine-metrics-interval", "0.5"),
    *("--prefill-policy", "round_robin", "--decode-policy", "round_robin"),
)


@pytest.fixture(scope="module", params=[TransferMode.PULL, TransferMode.PUSH], ids=str)
def four(request, fleet, model, lab):
    """P0, P1 and D1 on one host, D0 on the other; P0's side channel has an IP address of its own."""
    if lab is None:
        pytest.skip(f"no network lab: {lab_available()}")
    mode = request.param
    alone = lab.p.data_ip.rsplit(".", 1)[0] + ".17"
    _ip(lab.p, "addr", "replace", f"{alone}/32", "dev", DATA)
    _ip(lab.d, "route", "replace", f"{alone}/32", "dev", DATA)
    config = {"transfer_timeout": GIVES_UP_S, "handshake_timeout": GIVES_UP_S, "registration_timeout": GIVES_UP_S}

    def engine(name, role, host, **more):
        spec = engine_spec(
            f"{name}-pairs-{mode}", model, role=role, connector=Connector.PDRELAY, mode=mode,
            extra_connector_config={**config, "retry_after": 0.1}, **(host.options | more),
        )  # fmt: skip
        return spec, start_engine(fleet, spec)

    (p0, *_), *others = started = [
        engine("p0", Role.PREFILL, lab.p, side_channel_host=alone),
        engine("p1", Role.PREFILL, lab.p),
        engine("d0", Role.DECODE, lab.d),
        engine("d1", Role.DECODE, lab.p),
    ]
    p1, d0, d1 = (spec for spec, _ in others)
    command = router_command(f"router-pairs-{mode}", [p0, p1], [d0, d1], env={"ADMIN_API_KEY": "sesame"}, args=ROUTER)
    router = fleet.start(command)
    children = [child for _, child in started]
    try:
        fleet.wait_ready([*children, router], timeout_s=400)
        yield Four(base_url(command), lab, alone, [p0, p1, d0, d1])
    finally:
        _mend(lab, alone)
        fleet.stop(router, *children)


def _ip(host, *arguments):
    subprocess.run(["ip", "-n", host.namespace, *arguments], check=True, capture_output=True, timeout=10)


def _mend(lab, address):
    subprocess.run(
        ["ip", "-n", lab.d.namespace, "neigh", "del", address, "dev", DATA],
        check=False, capture_output=True, timeout=10,
    )  # fmt: skip


class Four:
    """Two prefill and two decode engines behind a router."""

    def __init__(self, router, lab, address, specs):
        self.router, self.specs = router, specs
        self._lab, self._address, self._numbers = lab, address, iter(range(600, 900))

    def cut(self):
        """Have D0 send what is for P0's side channel to a MAC address that no host has."""
        _ip(self._lab.d, "neigh", "replace", self._address, "lladdr", NOBODY, "nud", "permanent", "dev", DATA)

    def mend(self):
        _mend(self._lab, self._address)

    def ask(self, reference):
        """Complete a new prompt, whose text must be that of one engine; return the pair, and the seconds it took."""
        prompt = prompt_of(next(self._numbers))
        began = time.monotonic()
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        response = httpx.post(f"{self.router}/v1/completions", json=body, timeout=120, trust_env=False)
        seconds = time.monotonic() - began
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == plain(reference, prompt, tokens=TOKENS)
        timing = dict(part.split(";desc=", 1) for part in response.headers["server-timing"].split(", "))
        engines = tuple(timing[leg].split('"')[1] if leg in timing else None for leg in ("prefill", "decode"))
        return SimpleNamespace(pair=engines, seconds=seconds)

    def pairs(self):
        """Return the rows of ``pdrelay pairs``."""
        found = httpx.get(f"{self.router}/pairs", headers=KEY, timeout=30, trust_env=False).json()["pairs"]
        return {(row["prefill"], row["decode"]): row for row in found}

    def ask_until(self, reference, condition, *, seconds, what):
        """Ask one request after the other until the pairs are so; return the answers."""
        answers = []
        end = time.monotonic() + seconds
        while not condition(self.pairs()):
            assert time.monotonic() < end, f"{what}: not within {seconds} s; {self.pairs()}"
            answers.append(self.ask(reference))
        return answers


def test_requests_go_round_a_pair_that_cannot_meet_and_come_back(four, reference):
    """No text is wrong and no request fails; after three requests of the pair none waits for it."""
    four.ask_until(reference, lambda rows: len(rows) == 4, seconds=120, what="all pairs have met")
    four.cut()
    before = four.ask_until(
        reference, lambda rows: rows[CUT]["state"] == "resting", seconds=120, what="the pair that is cut rests"
    )
    reason = four.pairs()[CUT]["reason"]
    during = [four.ask(reference) for _ in range(9)]
    others = {pair: row["state"] for pair, row in four.pairs().items() if pair != CUT}
    four.mend()
    four.ask_until(reference, lambda rows: rows[CUT]["state"] == "well", seconds=180, what="the pair has met again")
    after = [four.ask(reference) for _ in range(8)]
    print(
        f"\n{Counter(answer.pair for answer in before)} until it rests ({reason}), the slowest after "
        f"{max(answer.seconds for answer in before):.1f} s; then {Counter(answer.pair for answer in during)}"
    )

    assert CUT in {answer.pair for answer in after}
    assert [answer.pair for answer in before].count(CUT) >= 3
    assert reason in ("handshake", "timeout")
    trials = [answer for answer in during if answer.pair == CUT]
    assert len(trials) <= 1  # nine requests may take as long as the rest: then one of them tries the pair again
    assert {answer.pair for answer in during} >= set(others)
    assert set(others.values()) == {"well"}
    for spec in four.specs:
        wait_until(lambda spec=spec: nothing_held(spec), seconds=60, what=f"{spec.name} holds no block")
