"""The token ids of a prompt in a prefill engine's answer, and when to request them."""

from collections.abc import Iterator
from typing import Final

from pdrelay_proxy.core.model import Api, GenerationRequest, RoutingHints
from pdrelay_proxy.core.raw_json import NULL
from pdrelay_proxy.core.schemas import TokensAnswer
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.features.kv_events.core.token_blocks import is_plain, packed_json

IDS_MOST: Final = 1 << 21  # bytes of their JSON: 300,000 ids
PIECE: Final = 1 << 15  # bytes of their JSON that are read at once: 5,000 ids, 0.2 ms
_FOR: Final = (Api.CHAT, Api.COMPLETIONS)
_UNEVEN: Final = ("tools", "documents")  # some templates write them before the last message


def may_tell_ids(call: GenerationRequest, hints: RoutingHints) -> bool:
    """Tell whether a prompt's cache blocks follow from the token ids that an engine returns."""
    if call.api not in _FOR or not is_plain(call.fields):
        return False
    blocks = hints.blocks
    return blocks.is_compared and not blocks.has_media


def is_even(hints: RoutingHints) -> bool:
    """Tell whether the tokens of a prompt come in the order of its text, by its fields."""
    if hints.prompt[:1] != b"[":
        return True
    for name in _UNEVEN:  # noqa: SIM110 (a generator takes twice as long)
        if name in hints.context and hints.context[name] != NULL:
            return False
    return True


def ids_in(answer: TokensAnswer | None) -> bytes:
    """Return the JSON of the prompt's ids in an answer; empty: none."""
    if answer is None:
        return b""
    ids = answer.prompt_token_ids
    if ids == NULL and len(answer.choices) == 1:
        ids = answer.choices[0].prompt_token_ids
    return bytes(ids).strip() if ids != NULL else b""


def packed_ids(ids: bytes) -> Iterator[bytes]:
    """Yield the ids of a JSON list, packed, piece by piece.

    Raises:
        EngineError: no list of token ids.
    """
    at = 1
    end = len(ids) - 1
    if ids[:1] != b"[" or ids[end:] != b"]":
        raise EngineError("the ids of a prompt are no list")
    while at < end:
        cut = ids.find(b",", at + PIECE, end)
        cut = end if cut < 0 else cut
        piece = packed_json(b"[%b]" % ids[at:cut])
        if piece is None:
            raise EngineError("the ids of a prompt are no token ids")
        yield piece
        at = cut + 1
