"""Chats over pretended engines whose caches evict, with a toy tokenizer: what a router knows beside the truth."""

import json
import random
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Api, GenerationRequest, Role
from pdrelay_proxy.core.raw_json import Fields, decode, maybe
from pdrelay_proxy.core.routing.alone_bound import AloneBound
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.prefix import Prefix
from pdrelay_proxy.core.routing.prompt_memory import PREFIX_LIFETIME_S
from pdrelay_proxy.core.routing.routing_hints import hints_of_call
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_reports import EventReports
from pdrelay_proxy.features.kv_events.core.event_stream import read_batch
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrompts
from pdrelay_proxy.features.kv_events.core.prompt_learner import PromptLearner
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet, Loads
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.prefix_cache import PrefixCache

MODEL = "sim"
WORDS = [f"{'abcdefghijklm'[n % 13] * (1 + n % 7)}{n}" for n in range(400)] + ["ä" * (1 + n % 5) for n in range(40)]
LEAST = 300  # new bytes of a prompt that is split
SETTINGS = Settings(prefill_policy=PolicyName.PREFIX, decode_policy=PolicyName.PREFIX, min_split_new_bytes=LEAST)


def token_ids(text):
    """Return a text's tokens: pieces of words, some of one character; an image has ten."""
    return text_ids(text) if isinstance(text, str) else [9] * 10


@lru_cache(4096)  # every turn of a chat, and every look at an engine, asks for the same texts again
def text_ids(text):
    pieces = [word[at : at + 4] for word in text.split(" ") for at in range(0, len(word), 4)]
    return tuple([1000 + int.from_bytes(piece.encode(), "big") % 50_000 for piece in pieces])


def chat_ids(messages, *, thinks=False):
    """Return a chat's tokens as a template makes them; ``thinks``: the answer begins in a way that history has not."""
    ids = [1]
    for message in messages:
        ids += [2, {"system": 3, "user": 4, "assistant": 5}[message["role"]], *token_ids(message["content"]), 6]
    return [*ids, 2, 5, *([7, 8] if thinks else [])]


class Omniscient:
    """Knows every cache."""

    def __init__(self, world):
        self.world = world

    def matched(self, instance, ask, *, is_there=False):
        body = {name: json.loads(bytes(value)) for name, value in ask.context.items()}
        return len(ask.prompt) * self.world.truth(instance.id, body) // len(self.world.ids(body))

    def matches(self, among, ask, *, is_there=False):
        return [self.matched(instance, ask, is_there=is_there) for instance in among]

    def sent(self, instance, ask):
        """It sees what becomes of it."""


@dataclass
class World:
    """Two prefill and two decode engines, and a router that follows their events, or knows all."""

    blocks: int = 400
    thinks: bool = False
    omniscient: bool = False
    hits: int = 0
    asked: int = 0
    alone: int = 0
    now: float = 0.0
    caches: dict = field(default_factory=dict)
    _waiting: dict = field(default_factory=dict)

    def __post_init__(self):
        self.index, self.known = CacheIndex(), KnownPrompts(PREFIX_LIFETIME_S)
        registry = Registry(SETTINGS)
        for role in Role:
            for port in (1, 2):
                one = registry.add(role, Address("http", role.value, port)).id
                registry.learn(one, EngineCapabilities(models=frozenset({MODEL}), adapters=frozenset()))
                self.caches[one], self._waiting[one] = PrefixCache(self.blocks), deque()
                self.caches[one].readers.append(self._waiting[one])
                self.index.open(one, {one: None})
                self.caches[one].clear()
                self._apply(one, b"\x93\xcb" + bytes(8) + b"\x90\x00")
        learned = PushCoordinates(at_once=True)
        dice = random.Random(1).randrange
        if not self.omniscient:
            lookup = PromptLookup(self.known, self._time)
            learner = PromptLearner(self.known, self._time, lambda call: call(), lookup)
            added = (RoutingParts(EventReports(self.index, lookup), learner),)
            self.fleet = fleet_of(SETTINGS, registry, learned, self._time, dice, added=added)
        else:
            load = Loads(registry, self._time).of
            prefill, decode = (Prefix(load, LeastLoaded(load), Omniscient(self)) for _ in Role)
            choice = PolicyPerLeg(prefill, decode, decode_first=True)
            pairs = PairSelector(registry, GroupChoice(choice, decode), AloneBound(registry, self._time))
            self.fleet = LiveFleet(registry, pairs, learned, self._time)
        self.told()

    def _time(self):
        return self.now

    def _apply(self, name, payload):
        for _ in self.index.apply(name, read_batch(payload)):
            pass

    def told(self):
        """Have the router read all events."""
        for name, waiting in self._waiting.items():
            while waiting:
                self._apply(name, waiting.popleft())

    def ids(self, body):
        if "messages" in body:
            return chat_ids(body["messages"], thinks=self.thinks)
        return [1, *token_ids(body["prompt"])]

    def request(self, body):
        """Return the router's view of a request."""
        fields = decode(json.dumps(body).encode(), Fields)
        call = GenerationRequest(Api.CHAT if "messages" in body else Api.COMPLETIONS, fields, ())
        return call, hints_of_call(call)

    def truth(self, name, body):
        """Return how many tokens of a prompt an engine need not compute."""
        return self.caches[name].has(self.ids(body), body.get("cache_salt"))

    def seen(self, body):
        """Return the tokens that each engine is known to have, and how."""
        _, ask = self.request(body)
        return self.fleet.caches.tokens_by_engine(ask), self.fleet.caches.sources_by_engine(ask)

    def serve(self, body, answer):
        """Serve a request as the relay does; return whether one decode engine did it alone."""
        self.now += 10
        call, ask = self.request(body)
        ids = self.ids(body)
        salt = body.get("cache_salt")
        decodes = self.fleet.usable(Role.DECODE)
        reason, _ = self.fleet.pairs.small(decodes, ask, LEAST)
        self.asked += len(ids)
        prefill = None
        if reason is not None:
            decode_engine = self.fleet.choose(decodes, ask)
            self.alone += 1
        else:
            prefill, decode_engine = self.fleet.any_pair(ask)
        first = decode_engine if prefill is None else prefill
        self.hits += self.truth(first.id, body)
        if prefill is not None:
            self.caches[prefill.id].use(ids, salt)
            reader = self.fleet.id_reader
            if reader is not None and reader.wants_ids(call, ask):
                reader.ids_told(ask, maybe(self.prefilled(body), TokensAnswer))
        self.caches[decode_engine.id].use(ids, salt)
        self.caches[decode_engine.id].use([*ids, *token_ids(answer)], salt)
        if self.fleet.caches is not None:
            self.fleet.caches.answered(decode_engine, ask, len(json.dumps(answer)))
        return prefill is None

    def prefilled(self, body):
        """Return a prefill engine's answer."""
        ids = self.ids(body)
        if "messages" in body:
            return json.dumps({"choices": [{"index": 0}], "prompt_token_ids": ids}).encode()
        return json.dumps({"choices": [{"index": 0, "prompt_token_ids": ids}]}).encode()


def said(dice, least, most):
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(least, most)))


class Clients:
    """Chats of many turns, in random order, some of which change what was said before; and a few texts."""

    def __init__(self, seed, *, chats=12):
        self.dice = random.Random(seed)
        self._system = [said(self.dice, 20, 120) for _ in range(3)]
        self._chats = [self._begin() for _ in range(chats)]
        self._document = said(self.dice, 300, 400)

    def _begin(self):
        return [{"role": "system", "content": self.dice.choice(self._system)}]

    def turn(self):
        """Return the next request's body, and what is answered; ``take`` it to go on."""
        dice = self.dice
        if dice.random() < 0.1:
            return {"model": MODEL, "prompt": f"{self._document} {said(dice, 2, 30)}"}, said(dice, 5, 20), None
        place = min(int(dice.expovariate(0.4)), len(self._chats) - 1)
        chat = self._chats[place]
        luck = dice.random()
        if luck < 0.06 or len(chat) > 24:
            chat = self._chats[place] = self._begin()
        elif luck < 0.12 and len(chat) > 3:
            del chat[-2:]  # the last turn is asked again in another way
        elif luck < 0.15 and len(chat) > 3:
            chat[1] = {"role": "user", "content": said(dice, 5, 40)}
        chat.append({"role": "user", "content": said(dice, *((4, 20) if dice.random() < 0.7 else (60, 200)))})
        return {"model": MODEL, "messages": list(chat)}, said(dice, 5, 60), chat


def play(world, seed, turns, look=None, *, restarts=0.01):
    """Have clients talk; ``look`` sees each request before it is served."""
    clients = Clients(seed)
    dice = random.Random(f"restarts {seed}")
    for _ in range(turns):
        body, answer, chat = clients.turn()
        if dice.random() < restarts:
            world.caches[dice.choice(list(world.caches))].clear()
        world.told()
        if look is not None:
            look(body)
        world.serve(body, answer)
        if chat is not None:
            chat.append({"role": "assistant", "content": answer})
    return world
