"""What the router does beyond the ordinary request, on real engines: other APIs, drains, load, clients that leave."""

import json
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from support.cluster import Watch, free_ports, metrics, wait_until
from support.fixtures import ADMIN_KEY
from support.questions import compare, questions
from support.router_orders import counted
from support.storm import fates, judge, salt, storm, texts
from support.victims import hang_up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WORDS = "copper garden seven letter " * 20
LOADS = "vllm:pdrelay_loads_total"
GRANTED = "vllm:pdrelay_leases_granted_total"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def post(url, path, body, **headers):
    return httpx.post(url + path, json=body, headers=headers, timeout=60, trust_env=False)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_several_answers_cost_one_prefill_and_one_load(mode, one_pair, engines, pushing, start_router):
    """Each is the one that a single engine gives for its seed, streamed or not; and nothing is held afterwards."""
    p, d = (engines.p0, engines.d0) if mode == "pull" else (pushing.p0, pushing.d0)
    url = one_pair if mode == "pull" else start_router("router-several", [p], [d])
    asked = [
        {"model": "tiny", "prompt": f"{number} {WORDS}", "max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 4}
        for number in range(6)
    ]

    def answers(url, body, *, stream):
        if not stream:
            return [choice["text"] for choice in post(url, "/v1/completions", body).json()["choices"]]
        texts = [""] * 4
        for line in post(url, "/v1/completions", {**body, "stream": True}).text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
        return texts

    def is_split():
        return "prefill;" in post(url, "/v1/completions", {**asked[0], "max_tokens": 2}).headers["server-timing"]

    wait_until(is_split, seconds=30, what="the router knows from their metrics that the engines share loads")
    with Watch(p) as prefill, Watch(d) as decode:
        ours = [answers(url, body, stream=number % 2 == 1) for number, body in enumerate(asked, start=1) if number > 1]

    assert ours == [answers(engines.reference.base_url, body, stream=False) for body in asked[1:]]
    assert all(len(set(texts)) > 1 for texts in ours)  # they are different answers
    assert (decode.delta(LOADS), decode.delta("vllm:pdrelay_loads_shared_total")) == (5, 15)
    assert prefill.delta("vllm:generation_tokens_total") == 5
    computed = decode.delta("vllm:prompt_tokens_by_source_total|local_compute")
    assert computed <= 5 * (1 + 3 * 32)  # the last token, and for the others what is no whole block


@pytest.mark.parametrize("kind", ["texts", "ids"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_each_of_several_prompts_goes_over_two_legs(mode, kind, one_pair, engines, pushing, start_router):
    """The choices and the usage are those of one engine, streamed or not; D has loaded each of the prompts."""
    p, d = (engines.p0, engines.d0) if mode == "pull" else (pushing.p0, pushing.d0)
    url = one_pair if mode == "pull" else start_router(f"router-prompts-{kind}", [p], [d])
    mark = 40 + 200 * (mode == "push")  # no prompt is in a cache
    ids = [[*range(mark + place, mark + place + 90 + 31 * place)] for place in range(6)]
    words = [f"{mode} {place} {WORDS * (1 + place % 3)}" for place in range(6)]
    asked = {"model": "tiny", "prompt": words if kind == "texts" else ids, "max_tokens": 12, "temperature": 0}
    asked |= {"logprobs": 2, "ignore_eos": True, "cache_salt": f"prompts {mode} {kind}"}

    def whole(url):
        answer = post(url, "/v1/completions", asked).json()
        said = {c["index"]: (c["text"], c["logprobs"]["tokens"], c["finish_reason"]) for c in answer["choices"]}
        return said, {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}

    def streamed(url):
        texts = {}
        tokens = {}
        ends = {}
        usage = {}
        lines = post(url, "/v1/completions", asked | STREAMED).text.splitlines()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        for line in lines:
            event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            for c in event["choices"]:
                texts[c["index"]] = texts.get(c["index"], "") + c["text"]
                tokens[c["index"]] = tokens.get(c["index"], []) + c["logprobs"]["tokens"]
                ends[c["index"]] = c["finish_reason"]
            usage = event.get("usage") or usage
        return {index: (texts[index], tokens[index], ends[index]) for index in texts}, {
            name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }

    with Watch(p), Watch(d) as decode:  # at its end they hold nothing
        ours = whole(url)
        asked["cache_salt"] += " streamed"
        shown = streamed(url)

    expected = whole(engines.reference.base_url)
    assert ours == expected
    assert shown == expected
    assert len(expected[0]) == 6
    assert decode.delta(LOADS) == 12


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "session", "prefix"])
def test_every_policy_with_load_reports(start_router, engines, reference_answer, policy):
    """P is asked how busy it is with every leg; the answers stay what they are."""
    args = ("--prefill-policy", policy, "--decode-policy", policy)
    url = start_router(f"router-{policy}", [engines.p0, engines.p1], [engines.d0, engines.d1], args=args)
    _, wrong = compare(url, questions(9, seed=31), reference_answer)

    assert wrong == {}


def test_a_drained_engine_ends_what_it_has_and_gets_nothing_new(start_router, engines, reference):
    """All requests that run while one engine of each role is drained are right; then it is drained, and back again."""
    url = start_router(
        "router-drain", [engines.p0, engines.p1], [engines.d0, engines.d1], env={"ADMIN_API_KEY": ADMIN_KEY}
    )
    key = {"X-Api-Key": ADMIN_KEY}
    drops = storm(60, seed=900, tokens=(40,))
    expected = texts(reference.address, drops)
    found = []
    asking = threading.Thread(target=lambda: found.extend(fates(url[7:], drops, at_once=12, cache_salt=salt())))

    def states():
        rows = httpx.get(f"{url}/instances", headers=key, trust_env=False).json()["instances"]
        return {row["id"]: (row["state"], row["in_flight"]) for row in rows}

    asking.start()
    wait_until(lambda: states()["decode-1"][1] > 0, seconds=20, what="decode-1 has requests")
    for name in ("prefill-1", "decode-1"):
        assert post(url, "/instances/drain", {"id": name}, **key).status_code == 200
    wait_until(lambda: states()["decode-1"][1] == 0, seconds=30, what="decode-1 has nothing left")
    with Watch(engines.d1) as drained:
        asking.join()
    counts, bad = judge(found, expected)

    assert bad == []
    assert counts == {"right": 60}
    assert drained.delta(LOADS) == 0
    wait_until(lambda: states()["prefill-1"][0] == "drained", seconds=40, what="the leases of prefill-1 are over")
    for name in ("prefill-1", "decode-1"):
        assert post(url, "/instances/undrain", {"id": name}, **key).status_code == 200
    counts, bad = judge(fates(url[7:], drops[:12], cache_salt=salt()), expected)
    assert (counts, bad) == ({"right": 12}, [])


@pytest.fixture
def black_hole():
    """An address that takes a connection and never accepts it: its backlog is full."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", free_ports(1)[0]))
        listening.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        time.sleep(0.1)
        yield "{}:{}".format(*listening.getsockname())
        for filler in fillers:
            filler.close()


def place(url):
    """Return what ``hang_up`` and the router's command line want to know of an address."""
    host, port = url.removeprefix("http://").split(":")
    return SimpleNamespace(host=host, port=int(port), address=f"{host}:{port}")


def test_a_client_that_leaves_between_the_legs_leaves_no_block_behind(start_router, engines, black_hole):
    """P has answered, and D cannot be reached: P's blocks are back when the client leaves, and no lease runs out."""
    args = ("--health-check-interval", "0", "--connect-timeout", "20")
    url = start_router("router-leaving", [engines.p0], [place(black_hole), engines.d0], args=args)
    with Watch(engines.p0) as prefill:

        def are_between():
            seen = metrics(engines.p0)
            granted = seen[GRANTED] - prefill.before.get(GRANTED, 0.0)
            return granted == 4 and seen["vllm:pdrelay_leases_held"] > 0

        leaving = [
            threading.Thread(
                target=hang_up,
                args=(place(url), {"prompt": WORDS + str(n), "max_tokens": 8}, 0.5),
                kwargs={"until": are_between},
            )
            for n in range(4)
        ]
        for client in leaving:
            client.start()
        for client in leaving:
            client.join()

    assert prefill.delta("vllm:pdrelay_leases_expired_total") == 0
    freed = 'pdrelay_kv_releases_total{instance="prefill-0",result="freed"}'
    wait_until(lambda: sum(counted(url, freed).values()) >= 1, seconds=20, what="the router knows what was freed")


def test_a_client_that_leaves_during_the_prefill_stops_it(one_pair, engines):
    """Closing the client's connection closes P's, and no lease has to run out.

    P has the prompt in its cache from the second time on: it finishes within milliseconds, often when the client leaves
    and the router does not know yet what P has leased.
    """
    with Watch(engines.p0) as prefill, Watch(engines.d0):
        for patience in (0.0, 0.01, 0.03, 0.1, 0.3, *(ms / 1000 for ms in range(30))):
            hang_up(place(one_pair), {"prompt": [7 + i % 400 for i in range(1800)], "max_tokens": 30}, patience)

    assert prefill.delta("vllm:pdrelay_leases_expired_total") == 0
