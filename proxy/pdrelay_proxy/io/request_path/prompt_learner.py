"""Takes the token ids of texts and chats out of prefill engines' answers; long ones in pieces, between other work."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from pdrelay_proxy.core.known_prompts import KnownPrompts
from pdrelay_proxy.core.model import RoutingHints
from pdrelay_proxy.core.protocol.prompt_ids import IDS_MOST, PIECE, ids_in, is_even, packed_ids
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.core.token_blocks import packed_json, prompt_of
from pdrelay_proxy.errors import EngineError

READINGS_MOST: Final = 8  # long answers that are read at a time: 2 ms in one turn of the event loop


class PromptLearner:
    """Fills the memory of known prompts."""

    def __init__(self, known: KnownPrompts, clock: Callable[[], float]) -> None:
        self._known = known
        self._clock = clock  # seconds; the one of the fleet
        self._readings = 0

    def learn(self, ask: RoutingHints, answer: TokensAnswer | None) -> None:
        """A prefill engine has answered that was asked for the ids of the prompt; None: it cannot be read."""
        ids, counts = ids_in(answer), self._known.counts
        if not ids:
            counts["missing"] += 1
        elif len(ids) <= PIECE:
            self._learn(ask, packed_json(ids))
        elif len(ids) > IDS_MOST or self._readings >= READINGS_MOST:
            counts["skipped"] += 1
        else:
            self._readings += 1
            self._go_on(ask, packed_ids(ids), [])

    def _go_on(self, ask: RoutingHints, pieces: Iterator[bytes], read: list[bytes]) -> None:
        """Read a piece, and the next one in another turn of the event loop."""
        piece = self._next(pieces)
        if piece:
            read.append(piece)
            asyncio.get_running_loop().call_soon(self._go_on, ask, pieces, read)
            return
        self._readings -= 1
        self._learn(ask, b"" if piece is None else b"".join(read))

    def _next(self, pieces: Iterator[bytes]) -> bytes | None:
        """Return the next ids, packed; empty: there is none; None: they cannot be read."""
        try:
            return next(pieces, b"")
        except EngineError:
            return None

    def _learn(self, ask: RoutingHints, ids: bytes | None) -> None:
        prompt = prompt_of(ids, ask.context) if ids else None
        if prompt is None:
            self._known.counts["missing"] += 1
        else:
            self._known.learn(ask.blocks, prompt, is_even=is_even(ask), now=self._clock())
