"""What the router makes of vLLM's KV events, and what vLLM's own cache says at the same moment."""

import random
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm import SamplingParams
    from vllm.distributed.kv_events import BlockStored, KVEventBatch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256, sha256_cbor
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_cache_spec_kind,
    )
    from vllm.v1.request import Request

import msgspec

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_stream import KvEventStream, read_batch
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
SIZE = 4
CONTEXT = 256
ROUNDS = 250
ENGINE = InstanceId("decode-0")
ATTENTION = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=SIZE, **ATTENTION)
MLA = MLAAttentionSpec(block_size=SIZE, **ATTENTION)
SLIDING = SlidingWindowSpec(block_size=SIZE, **ATTENTION, sliding_window=11)
STATE = MambaSpec(block_size=SIZE, shapes=((3, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
ADAPTERS = {name: LoRARequest(name, number, f"/{name}") for number, name in enumerate(("fr", "de"), start=1)}


class Engine:
    """vLLM's cache of one rank, and the router's index of it at the other end of a wire."""

    def __init__(self, *specs, blocks=40, function=sha256, dice, **manager):
        groups = [KVCacheGroupSpec([f"layer.{place}"], spec) for place, spec in enumerate(specs)]
        init_none_hash(function)
        self.cache = KVCacheManager(
            KVCacheConfig(blocks, [], groups), CONTEXT, SIZE, SIZE, enable_kv_cache_events=True, **manager
        )
        self.hasher = get_request_block_hasher(SIZE, function)
        self.dice, self.index, self.stream = dice, CacheIndex(), KvEventStream()
        self.index.open(ENGINE, {ENGINE: None})
        self.running = []
        self.made = 0
        self.batches = 0
        self.publish()

    def request(self, ids, salt=None, lora=None, image=None):
        self.made += 1
        return Request(
            f"r{self.made}", list(ids), SamplingParams(max_tokens=50), None, cache_salt=salt,
            lora_request=ADAPTERS.get(lora), mm_features=[image] if image else None, block_hasher=self.hasher,
        )  # fmt: skip

    def publish(self, events=None):
        """As vLLM encodes it, in frames of the wire, cut anywhere."""
        payload = msgspec.msgpack.encode(KVEventBatch(0.0, events or self.cache.take_events(), 0))
        frame = (len(payload) + 8).to_bytes(4, "big") + self.batches.to_bytes(8, "big") + payload
        self.batches += 1
        cut = self.dice.randrange(len(frame))
        for found in (*self.stream.feed(frame[:cut]), *self.stream.feed(frame[cut:])):
            assert sum(1 for _ in self.index.apply(ENGINE, read_batch(found))) < 10

    def begin(self, request, *, loads=False):
        """Schedule a prompt; ``loads``: its KV comes from elsewhere, and is cached when it is there."""
        blocks, hit, _ = self.cache.get_computed_blocks(request)
        new = request.num_tokens - hit
        more = {"num_external_computed_tokens": new - 1, "delay_cache_blocks": True} if loads else {}
        found = self.cache.allocate_slots(request, 1 if loads else new, hit, blocks, reserved_blocks=6, **more)
        if found is None:
            self.cache.free(request)  # nothing was taken
            return
        request.num_computed_tokens = request.num_tokens
        self.running.append((request, loads))

    def go_on(self):
        """A request makes a token, or what it waited for has come."""
        place = self.dice.randrange(len(self.running))
        request, loads = self.running[place]
        if loads:
            self.cache.cache_blocks(request, request.num_tokens - 1)
            self.running[place] = request, False
            return
        request.append_output_token_ids(self.dice.randrange(3))
        if self.cache.allocate_slots(request, 1, reserved_blocks=6) is None:
            self.end(place)
        else:
            request.num_computed_tokens = request.num_tokens

    def end(self, place):
        request, _ = self.running.pop(place)
        self.cache.free(request)

    def hit(self, ids, salt=None, lora=None):
        """Ask vLLM, with a request that is not run."""
        return self.cache.get_computed_blocks(self.request(ids, salt, lora))[1]

    def known(self, ids, salt=None, lora=None):
        return self.index.cached(ENGINE, TokenPrompt(ids, salt), lora)


def prompt(dice, *, most=60):
    """Prompts of few tokens, so that many have beginnings in common."""
    ids = list(range(10, 10 + dice.choice((0, 8, 16, 24))))
    return ids + [dice.randrange(3) for _ in range(dice.randrange(1, most - len(ids)))]


def history(engine, dice, compare):
    """Run random requests, and compare after every step."""
    asked = [(prompt(dice), None, None)]
    for _ in range(ROUNDS):
        what = dice.random()
        if what < 0.4 or not engine.running:
            ids, salt, lora = dice.choice(asked)
            if dice.random() < 0.5:
                ids = [*ids[: dice.randrange(len(ids))], *prompt(dice, most=30)][:60]
                salt = dice.choice((None, "s"))
                lora = dice.choice((None, None, *ADAPTERS))
            asked = [*asked[-11:], (ids, salt, lora)]
            engine.begin(engine.request(ids, salt, lora), loads=dice.random() < 0.3)
        elif what < 0.7:
            engine.go_on()
        elif what < 0.97:
            engine.end(dice.randrange(len(engine.running)))
        else:
            while engine.running:
                engine.end(0)
            engine.cache.reset_prefix_cache()
        engine.publish()
        for one in asked:
            compare(engine.known(*one), engine.hit(*one))
        assert len(engine.index) <= 40 * 3
    return engine


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("function", [sha256, sha256_cbor])
@pytest.mark.parametrize("spec", [FULL, MLA], ids=["full", "mla"])
def test_the_index_says_what_vllm_says(spec, function, seed, monkeypatch):
    """Salts, adapters, evictions, equal blocks of several requests, loads and resets: to the token."""
    found = set()

    def compare(known, hit):
        assert known == hit
        found.add(hit)

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(seed % 2))
    dice = random.Random(seed)
    engine = history(Engine(spec, function=function, dice=dice), dice, compare)
    counts = engine.index.take_counts(ENGINE)

    assert len(found) > 5
    assert counts.removed > 50
    assert (counts.ignored, counts.unknown_parents) == (0, 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "specs", [(FULL, SLIDING), (FULL, STATE), (FULL, STATE, SLIDING)], ids=["window", "state", "both"]
)
def test_of_several_groups_the_index_never_says_more(specs, seed):
    """A window's or a state's blocks that are gone end a hit, whatever the other group still has.

    A group is known from its first event on: one without blocks is enough.
    """
    found = []

    def compare(known, hit):
        assert known <= hit
        found.append((known, hit))

    dice = random.Random(seed)
    engine = Engine(*specs, blocks=60, dice=dice)
    kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
    windows = [getattr(spec, "sliding_window", None) for spec in specs]
    engine.publish([
        BlockStored(
            block_hashes=[], parent_block_hash=None, token_ids=[], block_size=SIZE, lora_id=None, medium="GPU",
            lora_name=None, group_idx=place, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window,
        )
        for place, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    ])  # fmt: skip
    history(engine, dice, compare)

    assert sum(known == hit for known, hit in found) > 0.9 * len(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_with_images_are_no_hits_of_texts(seed):
    """An image's tokens are placeholders: the same ids with another image, or as text, are other blocks."""
    found = []

    def compare(known, hit):
        assert known == hit
        found.append(hit)

    dice = random.Random(seed)
    engine = Engine(FULL, dice=dice, blocks=80)
    for _ in range(ROUNDS):
        ids = prompt(dice)
        at = dice.randrange(60)
        place = PlaceholderRange(offset=at, length=dice.randrange(1, 12))
        image = MultiModalFeatureSpec(None, "image", dice.choice("ab"), place) if at < len(ids) else None
        engine.begin(engine.request(ids, image=image))
        if len(engine.running) > 3:
            engine.end(dice.randrange(len(engine.running)))
        engine.publish()
        for known in (ids, ids[: at + 1], prompt(dice)):
            compare(engine.known(known), engine.hit(known))

    assert len(set(found)) > 5
    assert engine.index.take_counts(ENGINE).ignored == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_drafter_vllm_uses_one_block_less(seed):
    """EAGLE computes the last block of a hit again, for its own hidden states; the index tells what is cached."""
    found = []

    def compare(known, hit):
        assert known - hit in {0, SIZE}
        found.append(known - hit)

    dice = random.Random(seed)
    history(Engine(FULL, dice=dice, use_eagle=True), dice, compare)

    assert {0, SIZE} == set(found)
