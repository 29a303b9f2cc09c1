"""Chats over real engines whose caches are small: what the router says of each, and what vLLM counts."""

import json
import random
import re
import tempfile

import httpx
import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_tools.local.recipe import Connector
from support.cluster import MODEL_NAME, engine_spec, start_engine, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

KEY = "only-for-this-test"
BLOCKS, SIZE = 40, 32
HEADERS = {"authorization": f"Bearer {KEY}"}
PATH = "/v1/chat/completions"
NAMES = {Role.PREFILL: "prefill-0", Role.DECODE: "decode-0"}
ARGS = (
    *("--kv-events", "auto", "--prefill-policy", "prefix", "--decode-policy", "prefix"),
    *("--min-split-new-bytes", "300"),
)
WORDS = ("lighthouse", "ship", "storm", "harbour", "lamp", "sea", "night", "keeper", "rope", "signal", "coast", "fog")


@pytest.fixture(scope="module")
def pair(fleet, model):
    """A prefill and a decode engine whose events are followed."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:  # only this user may enter it
        specs = {}
        for role in Role:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"ipc://{folder}/{role.value}-inproc.ipc",
                "replay_endpoint": f"ipc://{folder}/{role.value}-inproc-replay.ipc",
            }
            small = (
                "--enable-prefix-caching",
                "--num-gpu-blocks-override",
                str(BLOCKS),
                "--enable-prompt-tokens-details",
            )
            specs[role] = engine_spec(
                f"events-{role.value}", model, role=role, connector=Connector.PDRELAY, block_size=SIZE,
                max_model_len=1024,
                extra_args=(*small, "--kv-events-config", json.dumps(events)),
                extra_env={"VLLM_API_KEY": KEY, "VLLM_PLUGINS": "pdrelay,pdrelay_kv_events"},
            )  # fmt: skip
        children = [start_engine(fleet, spec) for spec in specs.values()]
        fleet.wait_ready(children, timeout_s=300)
        yield specs
        fleet.stop(*children)


class Asked:
    """A router and its engines, and what they say of a prompt."""

    def __init__(self, url, pair):
        self.url, self.pair = url, pair
        self._markers = 0

    def told(self, body, path=PATH):
        """Return what the router says of each engine's cache: tokens, and how it knows."""
        question = {"path": path, "body": body}
        answer = httpx.post(f"{self.url}/instances/explain", json=question, headers={"x-api-key": KEY}, timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.json()["cached_tokens"], answer.json()["cached_known_by"]

    def settle(self):
        """Wait until the router knows what every engine has: events come in order."""
        self._markers += 1
        prompt = [20 + (self._markers * place + place * place) % 470 for place in range(1, SIZE + 2)]
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
        for role in Role:
            self.cached(role, body, "/v1/completions")
        both = dict.fromkeys(NAMES.values(), SIZE)
        wait_until(lambda: self.told(body, "/v1/completions")[0] == both, seconds=20, what="the router knows all")

    def cached(self, role, body, path=PATH):
        """Ask one engine for a token, and return how many of the prompt's were cached, as vLLM counts them."""
        asked = body | {"max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{self.pair[role].base_url}{path}", json=asked, headers=HEADERS, timeout=60)
        assert answer.status_code == 200, answer.text
        return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    def turn(self, body):
        """Have the router serve a turn; return the text, and why one engine did it alone, if it did."""
        asked = body | {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}{PATH}", json=asked, headers={"authorization": "Bearer x"}, timeout=60)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        return text, "".join(re.findall(r'reason;desc="(\w+)"', answer.headers["server-timing"]))


def test_what_the_router_knows_of_chats_is_what_is_cached(pair, start_router):
    """On both engines, while they evict.

    What events say of a prompt is what is hit. Of one that goes on behind what is known, at least that much is.
    """
    keys = {"ADMIN_API_KEY": KEY, "PDRELAY_PREFILL_API_KEY": KEY, "PDRELAY_DECODE_API_KEY": KEY}
    asked = Asked(start_router("router-chats", [pair[Role.PREFILL]], [pair[Role.DECODE]], args=ARGS, env=keys), pair)
    dice = random.Random("chats")
    chats = [[] for _ in range(4)]
    split = []
    alone = []
    hits = {"events": [], "events_and_sent": []}  # by how it is known: tokens by the router, and by vLLM
    for turn in range(3):
        for chat in chats:
            chat.append({"role": "user", "content": " ".join(dice.choices(WORDS, k=12 if turn == 1 else 60))})
            body = {"model": MODEL_NAME, "messages": list(chat)}
            text, reason = asked.turn(body)
            chat.append({"role": "assistant", "content": text})
            if reason:
                alone.append(reason)  # its tokens were not told
            else:
                split.append(body)
            for other in (body, dice.choice(split)):
                for role, name in NAMES.items():
                    asked.settle()
                    tokens, known_by = asked.told(other)
                    hits[known_by[name]].append((tokens[name], asked.cached(role, other)))

    print(hits, alone)  # what was seen is for the page
    assert [told for told, _ in hits["events"]] == [hit for _, hit in hits["events"]]
    assert all(told <= hit for told, hit in hits["events_and_sent"])
    assert len(hits["events"]) >= 12
    assert min(hits["events"])[0] < max(hits["events"])[0]
    assert set(alone) == {"cached_prompt"}
