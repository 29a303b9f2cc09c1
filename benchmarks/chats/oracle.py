"""What engines have cached, by their own KV events: an oracle that sees all caches.

It shares nothing with the router's index but the reading of bytes: blocks are found by vLLM's own
hashes.
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import httpx
import msgspec

from pdrelay_proxy.features.kv_events.core.event_stream import (
    PATH,
    KvEventStream,
    read_batch,
    read_event,
)
from pdrelay_proxy.features.kv_events.event_schemas import AllBlocksCleared, BlockRemoved

AGAIN_S = 0.3  # between two attempts to connect
SILENT_S = 10.0  # an engine sends a sign of life each second


class EngineBlocks:
    """The blocks of one engine with full attention and one data-parallel rank."""

    def __init__(self):
        self.is_known = False  # the state has come to its end
        # hash -> how often it was stored: equal blocks of two requests are kept apart
        self._counts = {}
        self._hashes = {}  # (hash of the block before, tokens, salt of the first block) -> hash
        self._size = 0

    def __len__(self):
        return len(self._counts)

    def clear(self):
        """Forget everything."""
        self.is_known = False
        self._counts, self._hashes = {}, {}

    def apply(self, payload):
        """Take a batch of events."""
        batch = read_batch(payload)
        self.is_known = self.is_known or not batch.events  # an empty batch ends the state
        for event in filter(None, map(read_event, batch.events)):
            if isinstance(event, AllBlocksCleared):
                self._counts, self._hashes = {}, {}
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._store(event)

    def cached(self, ids, salt):
        """Return how many tokens of a prompt need not be computed; vLLM always computes the last
        one.
        """
        parent = None
        tokens = 0
        size = self._size
        while size and tokens + size < len(ids):
            key = parent, tuple(ids[tokens : tokens + size]), salt if parent is None else None
            parent = self._hashes.get(key)
            if parent not in self._counts:
                break
            tokens += size
        return tokens

    def _store(self, event):
        parent, size = event.parent_block_hash, event.block_size
        self._size = size
        for place, name in enumerate(event.block_hashes):
            extra = event.extra_keys[place] if event.extra_keys else None
            salt = msgspec.msgpack.decode(extra[-1]) if extra and parent is None else None
            self._hashes[
                parent, tuple(event.token_ids[place * size : (place + 1) * size]), salt
            ] = name
            self._counts[name] = self._counts.get(name, 0) + 1
            parent = name

    def _remove(self, event):
        for name in event.block_hashes:
            left = self._counts.pop(name, 1) - 1
            if left:
                self._counts[name] = left


class Oracle:
    """All engines, followed from the event loop; ``engines``: name -> base URL."""

    def __init__(self, engines, key):
        self.blocks = {name: EngineBlocks() for name in engines}
        self._engines = engines
        self._headers = {"authorization": f"Bearer {key}"}

    def cached(self, ids, salt):
        """Return the tokens of a prompt that each engine has."""
        return {name: blocks.cached(ids, salt) for name, blocks in self.blocks.items()}

    async def knows(self, name):
        """Wait until an engine that was started again has sent its state."""
        while not self.blocks[name].is_known:
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def following(self, *, timeout_s):
        """Follow all engines during the block; raises TimeoutError unless each has sent its state
        in time.
        """
        tasks = [
            asyncio.create_task(self._follow(name, url)) for name, url in self._engines.items()
        ]
        try:
            async with asyncio.timeout(timeout_s):
                while not all(blocks.is_known for blocks in self.blocks.values()):
                    await asyncio.sleep(0.05)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name, url):
        """Follow one engine, also after it was restarted."""
        timeout = httpx.Timeout(SILENT_S)
        async with httpx.AsyncClient(
            trust_env=False, timeout=timeout, headers=self._headers
        ) as client:
            while True:
                with suppress(httpx.HTTPError):  # it is being restarted
                    await self._read(client, name, url + PATH)
                self.blocks[name].clear()
                await asyncio.sleep(AGAIN_S)

    async def _read(self, client, name, url):
        stream = KvEventStream()
        async with client.stream("GET", url) as answer:
            if answer.status_code == 200:
                async for data in answer.aiter_raw():
                    for payload in stream.feed(data):
                        self.blocks[name].apply(payload)
