"""Two engines with prefix caches, of which one reads from the other's: what vLLM does with a cache is played here."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLender, PrefixLookup, Question
from pdrelay_connector.core.cached_prefix.prefill_scheduler import PrefixFinder, SearchEnded
from pdrelay_connector.core.control import ControlPlane
from pdrelay_connector.core.ids import BlockId, EngineId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEnded
from pdrelay_connector.core.messages import FindPrefix, Reachable
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from support.engines import BLOCK_SIZE, LEASE, Engine, World, rank_info

SEARCH = 1.0  # s that a search may take


def pack(tokens):
    """Token ids as a FindPrefix has them."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def chain(message):
    """Hash the full blocks of a prompt, each with all before it and the salt."""
    size = 4 * BLOCK_SIZE
    salt = (message.salt or "").encode()
    stops = range(size, len(message.tokens) + 1, size)
    return [hashlib.sha256(salt + b"\0" + message.tokens[:stop]).hexdigest()[:16].encode() for stop in stops]


def piecemeal(message):
    """Hash one block with each step."""
    yield from ([each] for each in chain(message))


class Pinned(NamedTuple):
    question: Question
    lease: RequestId
    blocks: list


@dataclass
class CachingEngine(Engine):
    """An engine whose ``cache`` maps a block's hash to its number; a block of it has its hash as bytes."""

    mode: str = "pull"
    cache: dict = field(default_factory=dict)
    uncomputed: set = field(default_factory=set)  # hashes of blocks that the step computes which is under way
    pinned: dict = field(default_factory=dict)  # lease -> blocks
    wanted: list = field(default_factory=list)
    to_answer: list = field(default_factory=list)
    found: dict = field(default_factory=dict)  # request -> what its search has ended with

    def __post_init__(self):
        super().__post_init__()
        manager = self.control.lease_manager
        own = Reachable(*self.address)
        self.finder = PrefixFinder(self.link, self.peers, self.counters, timeout=SEARCH)
        self.lender = PrefixLender(self.link, manager, self.counters, own, piecemeal)
        push_coordinator, push_receiver = self._push_parts() if self.mode == "push" else (None, None)
        self.control = ControlPlane(
            manager,
            self.control.lease_renewer,
            self.peers,
            self.counters,
            push_coordinator=push_coordinator,
            push_receiver=push_receiver,
            prefix_finder=self.finder,
            prefix_lender=self.lender,
        )

    def _push_parts(self):
        """What hands prompts over in push: it hears the same connections, and none of it is about what goes back."""
        link, manager = self.link, self.control.lease_manager
        coordinator = PushCoordinator(link, manager, self.counters, tokens={0: b"token"}, registration_timeout=LEASE)
        receiver = PushReceiver(
            link,
            self.peers,
            self.control.lease_renewer,
            self.counters,
            (rank_info(self.name),),
            timeout=LEASE,
            peer_timeout=LEASE,
        )
        return coordinator, receiver

    def owned(self):
        return [*super().owned(), list(self.cache.values())]

    def schedule(self, tokens, salt):
        """Begin to compute a prompt: what is not cached gets blocks, which are in the cache at once."""
        for name in chain(FindPrefix(RequestId(""), pack(tokens), salt)):
            if name not in self.cache and self.free:
                self.cache[name] = self.free.pop(0)
                self._fill(self.cache[name], b"not computed")
                self.uncomputed.add(name)

    def end_step(self):
        """What was scheduled is computed; and answers that waited for it leave."""
        for name in self.uncomputed:
            self._fill(self.cache[name], name)
        self.uncomputed.clear()
        waiting = self.to_answer
        self.to_answer = []
        for pinned in waiting:
            self.lender.answer(pinned.question, pinned.lease, BLOCK_SIZE, pinned.blocks)

    def look_up(self, *, now):
        """Pin what there is of the prompts that were asked for."""
        wanted = self.wanted
        self.wanted = []
        for question, hashes in wanted:
            names = []
            for name in hashes:
                if name not in self.cache:
                    break
                names.append(name)
            blocks = [BlockId(self.cache[name]) for name in names]
            lease = RequestId(f"cached-{len(self.pinned)}-{now}-{question.request}-{question.conn}")
            if blocks:
                self.pinned[lease] = blocks
                self.lender.lend(question, lease, now=now)
            if blocks and self.must_wait:
                self.to_answer.append(Pinned(question, lease, blocks))
            else:
                self.lender.answer(question, lease, BLOCK_SIZE, blocks)

    @property
    def must_wait(self):
        """Whether a step is under way that may still compute a block of the cache."""
        return bool(self.uncomputed)

    def evict(self, name):
        """Give a cached block to somebody else, unless it is pinned or in use; returns whether it was."""
        pins = Counter(block for blocks in self.pinned.values() for block in blocks)
        if pins[self.cache[name]] or name in self.uncomputed:
            return False
        return self.evict_all_the_same(name)

    def evict_all_the_same(self, name):
        """Give a block away, pinned or not."""
        self._free([self.cache.pop(name)])
        return True

    def search(self, request, tokens, salt, at, *, now):
        """Ask another engine for a prompt."""
        self.finder.find(FindPrefix(RequestId(request), pack(tokens), salt), EngineId(at.name), now=now)

    def _on_news(self, news, now):
        match news:
            case LeaseEnded(lease) if lease in self.pinned:
                self.freed.append(news)
                del self.pinned[lease]
            case PrefixLookup():
                self.wanted.append(news)
            case SearchEnded(request, found):
                assert request not in self.found, "a search ended twice"
                self.found[request] = found
                if found is not None:
                    self.control.lease_renewer.start_renewing(request, found, now=now)
            case _:
                super()._on_news(news, now)


class ReturningWorld(World):
    """P, which asks, and D, which has connected to P before. Both hand prompts over in one ``mode``."""

    engine = CachingEngine

    def __init__(self, mode="pull"):
        self.mode = mode
        super().__init__()
        self.meet()

    def start(self, name, port, **options):
        return super().start(name, port, mode=self.mode, **options)

    def meet(self):
        """D connects to P, as it does for the first handover."""
        self.d.peers.ensure_connected(EngineId(self.p.name), self.p.address, now=self.now)
        self.run()

    def compute(self, tokens, salt=None):
        """Have D compute a prompt."""
        self.d.schedule(tokens, salt)
        self.d.end_step()

    def search(self, tokens, salt=None, request="r"):
        """Have P ask D, and D look."""
        self.p.search(request, tokens, salt, self.d, now=self.now)
        self.run()
        self.d.look_up(now=self.now)
        self.run()
        return self.p.found.get(RequestId(request))
