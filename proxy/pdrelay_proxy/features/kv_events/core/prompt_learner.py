"""Requests the token ids of texts and chats from prefill engines, and reads their answers.

Long lists are read in pieces, between other work.
"""

from collections.abc import Callable, Iterator
from typing import Final

from pdrelay_proxy.core.model import GenerationRequest, RoutingHints
from pdrelay_proxy.core.routing.prompt_id_reader import PromptIdReader
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.features.kv_events.core.known_prompts import KnownPrompts
from pdrelay_proxy.features.kv_events.core.prompt_lookup import PromptLookup
from pdrelay_proxy.features.kv_events.core.token_blocks import packed_json, prompt_of
from pdrelay_proxy.features.kv_events.core.told_ids import (
    IDS_MOST,
    PIECE,
    ids_in,
    is_even,
    may_tell_ids,
    packed_ids,
)

# long lists that are read concurrently: 2 ms of an iteration of the event loop
READINGS_MOST: Final = 8


class PromptLearner(PromptIdReader):
    """Fills the memory of known prompts."""

    def __init__(
        self,
        known_prompts: KnownPrompts,
        clock: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
        lookup: PromptLookup,
    ) -> None:
        """``call_soon``: calls in the next iteration of the event loop."""
        self._known_prompts = known_prompts
        self._clock = clock  # seconds; the one of the fleet
        self._call_soon = call_soon
        self._lookup = lookup
        self._readings = 0

    def wants_ids(self, call: GenerationRequest, hints: RoutingHints, /) -> bool:
        """Tell whether the ids of a prompt are unknown, and an engine can report them."""
        return self._lookup.find(hints).ids is None and may_tell_ids(call, hints)

    def ids_told(self, hints: RoutingHints, answer: TokensAnswer | None, /) -> None:
        """Learn the ids in an answer."""
        ids = ids_in(answer)
        counts = self._known_prompts.counts
        if not ids:
            counts["missing"] += 1
        elif len(ids) <= PIECE:
            self._learn(hints, packed_json(ids))
        elif len(ids) > IDS_MOST or self._readings >= READINGS_MOST:
            counts["skipped"] += 1
        else:
            self._readings += 1
            self._read_on(hints, packed_ids(ids), [])

    def _read_on(self, hints: RoutingHints, pieces: Iterator[bytes], read: list[bytes]) -> None:
        """Read a piece, and the next one in another iteration of the event loop."""
        piece = self._next(pieces)
        if piece:
            read.append(piece)
            self._call_soon(lambda: self._read_on(hints, pieces, read))
            return
        self._readings -= 1
        self._learn(hints, b"" if piece is None else b"".join(read))

    def _next(self, pieces: Iterator[bytes]) -> bytes | None:
        """Return the next ids, packed; empty: the end; None: unreadable."""
        try:
            return next(pieces, b"")
        except EngineError:
            return None

    def _learn(self, hints: RoutingHints, ids: bytes | None) -> None:
        prompt = prompt_of(ids, hints.context) if ids else None
        if prompt is None:
            self._known_prompts.counts["missing"] += 1
        else:
            self._known_prompts.learn(
                hints.blocks, prompt, is_even=is_even(hints), now=self._clock()
            )
