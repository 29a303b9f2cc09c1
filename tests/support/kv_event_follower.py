"""A reader of a real engine's KV events, which says from them alone how much of a prompt is cached."""

import threading
from dataclasses import dataclass, field

import httpx

from support.cluster import wait_until
from support.kv_events import StreamReader, decoded


@dataclass
class Follower:
    """A reader on a thread of its own."""

    url: str
    headers: dict
    size: int  # tokens of a block
    reader: StreamReader = field(default_factory=StreamReader)
    status: int = 0

    def __post_init__(self):
        self._closing = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        with httpx.stream("GET", self.url, headers=self.headers, timeout=10) as answer:
            self.status = answer.status_code
            for data in answer.iter_raw() if self.status == 200 else ():
                self.reader.feed(data)
                if self._closing:
                    return

    def close(self):
        """Leave; there is a sign of life each second."""
        self._closing = True
        self._thread.join(10)

    def wait(self, marker, rank=0):
        """Wait until the blocks of the last prompt are known: those of all before it are, then."""
        wait_until(lambda: self.knows(marker, rank), seconds=20, what="the reader knows all")

    def knows(self, marker, rank=0):
        """Whether a prompt of one block and a token is known, and the state was told to its end."""
        return rank in self.reader.complete and self.hit(marker, rank) == self.size

    def hit(self, prompt, rank=0):
        """Return how many tokens of a prompt are cached, as its blocks say; vLLM computes the last one again."""
        blocks = {}  # (parent, tokens) -> hash
        for batch in self.reader.batches:
            for event in decoded(batch).events:
                parent = getattr(event, "parent_block_hash", None)
                for number, name in enumerate(event.block_hashes if hasattr(event, "token_ids") else ()):
                    blocks[parent, tuple(event.token_ids[number * self.size : (number + 1) * self.size])] = name
                    parent = name
        known = {name for name, _ in self.reader.names(rank)}
        parent = None
        tokens = 0
        while tokens + self.size < len(prompt):
            parent = blocks.get((parent, tuple(prompt[tokens : tokens + self.size])))
            if parent not in known:
                break
            tokens += self.size
        return tokens
