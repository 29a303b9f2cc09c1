"""What following KV events costs the router: CPU microseconds for each block told of, and for each
prompt looked up.

``python -m benchmarks.router.kv_events``: a table, of the modules that are imported (plain or
compiled).
"""

import asyncio
import gc
import random
import statistics
import time
import tracemalloc

import msgspec

from pdrelay_proxy.core.model import InstanceId, RoutingHints
from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.features.kv_events.core import cache_index
from pdrelay_proxy.features.kv_events.core.cache_index import CacheIndex
from pdrelay_proxy.features.kv_events.core.event_stream import KvEventStream, read_batch
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrompts
from pdrelay_proxy.features.kv_events.core.prompt_learner import PromptLearner
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.core.token_blocks import TokenPrompt, token_prompt

D0 = InstanceId("decode-0")
SIZE = 16
TOKENS = 8192
PROMPTS = 100
ROUNDS = 5


def stored(ids, dice):
    blocks = [dice.randbytes(32) for _ in range(len(ids) // SIZE)]
    return {
        "type": "BlockStored", "block_hashes": blocks, "parent_block_hash": None, "token_ids": ids, "block_size": SIZE,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * len(blocks), "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip


def removals(event):
    return [
        {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}
        for name in event["block_hashes"]
    ]


def frames(batches):
    payloads = [msgspec.msgpack.encode([0.0, batch, 0]) for batch in batches]
    return [
        (len(payload) + 8).to_bytes(4, "big") + number.to_bytes(8, "big") + payload
        for number, payload in enumerate(payloads)
    ]


def apply(index, stream, data):
    """Return the CPU seconds of all, and of the longest step."""
    longest = 0.0
    began = time.process_time()
    for piece in data:
        last = time.process_time()
        for payload in stream.feed(piece):
            for _ in index.apply(D0, read_batch(payload)):
                longest = max(longest, time.process_time() - last)
                last = time.process_time()
        longest = max(longest, time.process_time() - last)
    return time.process_time() - began, longest


def timed(act, times=1):
    """Return the CPU microseconds of one call."""
    began = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - began) / times * 1e6


def round_of(dice):
    prompts = [[dice.randrange(150_000) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    events = [stored(ids, dice) for ids in prompts]
    index = CacheIndex()
    seen = {}
    index.open(D0, {D0: None})
    state = frames([[], *[[event] for event in events], *[removals(event) for event in events]])
    cut = PROMPTS + 1
    stream = KvEventStream()
    blocks = PROMPTS * TOKENS // SIZE
    gc.collect()
    seconds, longest = apply(index, stream, state[:cut])
    seen["µs for a block stored"], seen["ms of the longest step"] = (
        seconds / blocks * 1e6,
        longest * 1e3,
    )
    text = str(prompts[0]).encode()
    seen[f"µs to read a prompt of {TOKENS} ids"] = timed(lambda: token_prompt(text, {}), 20)
    seen["µs to look it up where all is cached"] = timed(
        lambda: index.cached(D0, TokenPrompt(prompts[1]), None), 20
    )
    known = TokenPrompt(prompts[2])
    index.cached(D0, known, None)
    seen["µs at each further engine"] = timed(lambda: index.cached(D0, known, None), 200)
    packed = TokenPrompt([1] * TOKENS)
    seen["µs to look it up where nothing is"] = timed(lambda: index.cached(D0, packed, None), 200)
    seen["µs for a block removed"] = apply(index, stream, state[cut:])[0] / blocks * 1e6
    return seen


async def reading(count, dice):
    """Return what an answer with so many ids costs the event loop, and what is made of them the
    next turn of a chat.
    """
    ids = [dice.randrange(150_000) for _ in range(count)]
    chat = [{"role": "user", "content": "word " * (count * 4 // 5)}]
    later = [*chat, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    ask, next_ask = (RoutingHints(prompt=msgspec.json.encode(each)) for each in (chat, later))
    answer, next_answer = (
        msgspec.json.encode({"prompt_token_ids": each}) for each in (ids, ids + ids[:50])
    )
    known = KnownPrompts(1e9)
    seen = {}
    soon = asyncio.get_running_loop().call_soon
    learner = PromptLearner(known, time.monotonic, soon, PromptLookup(known, time.monotonic))
    assert ask.blocks.size < next_ask.blocks.size
    began = last = time.process_time()
    learner.ids_told(ask, maybe(answer, TokensAnswer))
    longest = time.process_time() - last
    while not known.counts:
        last = time.process_time()
        await asyncio.sleep(0)
        longest = max(longest, time.process_time() - last)
    seen[f"ms to learn {count} ids"] = (time.process_time() - began) * 1e3
    seen[f"ms of it in the longest turn, {count} ids"] = longest * 1e3
    seen[f"µs to find them for the next turn, {count} ids"] = timed(
        lambda: known.find(next_ask.blocks, now=0), 20
    )
    learner.ids_told(next_ask, maybe(next_answer, TokensAnswer))
    while known.counts["learned"] < 2:
        await asyncio.sleep(0)
    assert known.counts["continued"] == 1
    return seen


def memory(dice):
    """Return the bytes that a block takes."""
    ids = [dice.randrange(150_000) for _ in range(160_000)]
    (data,) = frames([[stored(ids, dice)]])
    tracemalloc.start()
    index = CacheIndex()
    index.open(D0, {D0: None})
    apply(index, KvEventStream(), [data])
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(index)


def main():
    rounds = [round_of(random.Random(seed)) for seed in range(ROUNDS)]
    for seed, seen in enumerate(rounds):
        for count in (TOKENS, 100_000):
            gc.collect()
            seen.update(asyncio.run(reading(count, random.Random(seed))))
    kind = "plain" if cache_index.__file__.endswith(".py") else "compiled"
    print(f"| {kind}, blocks of {SIZE} tokens, median of {ROUNDS} rounds | |\n|---|---|")
    for name in rounds[0]:
        print(f"| {name} | {statistics.median(seen[name] for seen in rounds):.2f} |")
    print(f"| bytes for a block | {memory(random.Random(0)):.0f} |")


if __name__ == "__main__":
    main()
