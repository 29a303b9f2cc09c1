"""The blocks of a prompt of token ids, each named by all that comes before its end, as engines'
caches compare them.

vLLM hashes a block with its parent's hash, its token ids and its extra keys (``hash_block_tokens``
in vllm/v1/core/kv_cache_utils.py). Its first hash is random or configured, and the function is
chosen by the operator, so its hashes are its own. The keys here are made of the same contents in
the same way, for events and for prompts alike. They are Python's hashes: 61 bits, and of bytes with
a secret of the process, so no client can choose them.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from pdrelay_proxy.core.raw_json import NULL, NotJson, decode, maybe

BlockKey: TypeAlias = int
ROOT: Final[BlockKey] = 0  # the parent of a first block
ITEM: Final = 4  # bytes of a token id
PROMPT_MOST: Final = 1 << 23  # bytes of JSON; a longer prompt is not looked at
_PIECE: Final = 512  # bytes of the JSON of token ids that are read together
_PIECES_MOST: Final = 4096  # that are remembered: 7 MB, and 13 at most
_PIECES: Final[dict[bytes, bytes]] = {}  # the ids by their JSON
_ENCODER: Final = msgspec.msgpack.Encoder()
_BRACKET: Final = 91
_DIGITS: Final = frozenset(b"0123456789")
_SPACES: Final = b" \t\r\n"
# With one of these the engine's tokens are others, or more than tokens decides what is in a block.
_OTHER_CONTENT: Final = ("truncate_prompt_tokens", "prompt_embeds", "features", "suffix")


def packed(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, ITEM each; raises OverflowError: one is no token id."""
    return array("I", ids).tobytes()


def packed_json(ids: bytes) -> bytes | None:
    """Return the token ids of a JSON list as bytes; None: it is no list of token ids.

    Prompts begin alike, so it is read in pieces, and those that came before are remembered.
    """
    pieces: list[bytes] = []
    at = 1
    end = len(ids) - 1
    if ids[:1] != b"[" or ids[end:] != b"]":
        return None
    while at < end:
        cut = ids.find(b",", at + _PIECE, end) if at + _PIECE < end else end
        if cut < 0:
            cut = end
        text = ids[at:cut]
        piece = _PIECES.get(text) or _packed_piece(text)
        if piece is None:
            return None
        pieces.append(piece)
        at = cut + 1
    return b"".join(pieces)


def _packed_piece(ids: bytes) -> bytes | None:
    """Read some of the ids of a list, and remember them; None: one is no token id.

    With white space between them they may have any length, and are not remembered.
    """
    try:
        piece = packed(decode(b"[%b]" % ids, list[int]))
    except (NotJson, OverflowError):
        return None
    if len(ids) > 2 * _PIECE:
        return piece
    if len(_PIECES) >= _PIECES_MOST:
        _PIECES.clear()
    _PIECES[ids] = piece
    return piece


def extras_of(lora: str | None, keys: Sequence[msgspec.Raw]) -> bytes:
    """Return the extra keys of a block as bytes: empty, if it has none.

    ``keys``: in msgpack, as vLLM's events have them: those of an adapter begin with its name, which
    an event has twice.
    """
    found = b"".join([bytes(key) for key in keys])
    if lora is None:
        return found
    name = _ENCODER.encode(lora)
    # the nil tells a name from a salt
    return b"\xc0" + (found if found.startswith(name) else name + found)


def key_of(parent: BlockKey, tokens: bytes, extras: bytes) -> BlockKey:
    """Return the key of a block."""
    return hash((parent, tokens, extras)) if extras else hash((parent, tokens))


class TokenPrompt:
    """A prompt of token ids.

    Keys are made as they are asked for: a prompt that no engine knows costs one.
    """

    __slots__ = ("count", "made", "salts", "tokens")

    def __init__(self, ids: Sequence[int], salt: str | None = None) -> None:
        """``ids``: may be packed; ``salt``: its ``cache_salt``.

        Raises OverflowError: one of the ids is no token id.
        """
        self.tokens = ids if isinstance(ids, bytes) else packed(ids)
        self.count = len(self.tokens) // ITEM
        self.salts = (msgspec.Raw(_ENCODER.encode(salt)),) if salt else ()
        self.made: dict[tuple[int, str | None], list[BlockKey]] = {}  # by block size and adapter

    def common(self, other: "TokenPrompt") -> int:
        """Return how many token ids both begin with."""
        mine = self.tokens
        theirs = other.tokens
        low = 0
        high = min(self.count, other.count)
        if mine[: high * ITEM] == theirs[: high * ITEM]:
            return high
        while low + 1 < high:  # they have the first ``low`` in common, and not the first ``high``
            middle = (low + high) // 2
            if mine[low * ITEM : middle * ITEM] == theirs[low * ITEM : middle * ITEM]:
                low = middle
            else:
                high = middle
        return low

    def take_keys(self, other: "TokenPrompt", count: int) -> None:
        """Take over the keys of another prompt's blocks, as far as both begin with the same
        ``count`` ids.
        """
        if self.salts != other.salts:
            return
        for (size, lora), keys in other.made.items():
            self.made[size, lora] = keys[: count // size]

    def keys(self, size: int, lora: str | None) -> list[BlockKey]:
        """Return the keys that are made, of the first blocks of this size; ``more`` makes the
        next.
        """
        found = self.made.get((size, lora))
        if found is None:
            found = self.made[size, lora] = []
        return found

    def more(self, keys: list[BlockKey], size: int, lora: str | None) -> BlockKey:
        """Make and return the next key; ``keys``: what ``keys`` has returned.

        The block must be full.
        """
        place = len(keys)
        step = size * ITEM
        start = place * step
        tokens = self.tokens[start : start + step]
        parent = keys[-1] if place else ROOT
        if lora is None and (place or not self.salts):
            key = hash((parent, tokens))  # as ``key_of`` does
        else:
            name = () if lora is None else (msgspec.Raw(_ENCODER.encode(lora)),)
            key = key_of(parent, tokens, extras_of(lora, name if place else (*name, *self.salts)))
        keys.append(key)
        return key


def token_prompt(
    prompt: bytes | memoryview, context: Mapping[str, msgspec.Raw]
) -> TokenPrompt | None:
    """Read a prompt's JSON; None: it is not one list of token ids, or its blocks depend on more
    than these.
    """
    if len(prompt) > PROMPT_MOST or not prompt or not is_plain(context):
        return None
    if (prompt[0] != _BRACKET or prompt[1] not in _DIGITS) and not _begins_with_digit(
        bytes(prompt[:64])
    ):
        return None
    ids = packed_json(bytes(prompt).strip(_SPACES))
    return None if ids is None else prompt_of(ids, context)


def is_plain(context: Mapping[str, msgspec.Raw]) -> bool:
    """Tell whether the blocks of a request's prompt depend on no more than its token ids, salt and
    adapter.
    """
    for name in _OTHER_CONTENT:  # noqa: SIM110 (a generator takes twice as long)
        if name in context and context[name] != NULL:
            return False
    return True


def prompt_of(ids: Sequence[int], context: Mapping[str, msgspec.Raw]) -> TokenPrompt | None:
    """Return the prompt of a request that has these fields; None: an id is no token id, or the salt
    no text.

    ``ids``: may be packed.
    """
    said = context.get("cache_salt", NULL)
    salt = None if said == NULL else maybe(said, str)
    if salt is None and said != NULL:
        return None
    try:
        return TokenPrompt(ids, salt)
    except (OverflowError, TypeError):
        return None


def _begins_with_digit(start: bytes) -> bool:
    """Tell a list of numbers from lists of other things, and from texts."""
    start = start.lstrip(_SPACES)
    if not start or start[0] != _BRACKET:
        return False
    inside = start[1:].lstrip(_SPACES)
    return bool(inside) and inside[0] in _DIGITS
