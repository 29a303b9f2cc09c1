"""Keys for the blocks of a prompt of token ids; equal keys mean equal tokens up to their end.

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
PROMPT_MOST: Final = 1 << 23  # bytes of JSON; a longer prompt is not looked up
_PIECE: Final = 512  # bytes of JSON of token ids that are parsed at once
_PIECES_MOST: Final = 4096  # cached pieces: 7 MB, and 13 at most
_PIECES: Final[dict[bytes, bytes]] = {}  # the ids by their JSON
_ENCODER: Final = msgspec.msgpack.Encoder()
_BRACKET: Final = 91
_DIGITS: Final = frozenset(b"0123456789")
_SPACES: Final = b" \t\r\n"
# With one of these fields an engine's tokens differ, or its blocks depend on more than tokens.
_OTHER_CONTENT: Final = ("truncate_prompt_tokens", "prompt_embeds", "features", "suffix")


def packed(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, ITEM each; raises OverflowError: one is no token id."""
    return array("I", ids).tobytes()


def packed_json(ids: bytes) -> bytes | None:
    """Return the token ids of a JSON list as bytes; None: it is no list of token ids.

    Prompts share beginnings, so it is parsed in pieces, which are cached.
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
    """Parse a piece of a list, and cache it; None: one is no token id.

    With white space a piece may have any length; a long one is not cached.
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

    ``keys``: in msgpack, as in vLLM's events. With an adapter they begin with its name, which an
    event has in ``lora_name``, too.
    """
    content = b"".join([bytes(key) for key in keys])
    if lora is None:
        return content
    name = _ENCODER.encode(lora)
    # the nil tells a name from a salt
    return b"\xc0" + (content if content.startswith(name) else name + content)


def key_of(parent: BlockKey, tokens: bytes, extras: bytes) -> BlockKey:
    """Return the key of a block."""
    return hash((parent, tokens, extras)) if extras else hash((parent, tokens))


class TokenPrompt:
    """A prompt of token ids.

    Keys are computed on demand: a prompt that no engine has cached costs one.
    """

    __slots__ = ("count", "keys_by_size", "salts", "tokens")

    def __init__(self, ids: Sequence[int], salt: str | None = None) -> None:
        """``ids``: may be packed; ``salt``: its ``cache_salt``.

        Raises OverflowError: one of the ids is no token id.
        """
        self.tokens = ids if isinstance(ids, bytes) else packed(ids)
        self.count = len(self.tokens) // ITEM
        self.salts = (msgspec.Raw(_ENCODER.encode(salt)),) if salt else ()
        # by block size and adapter
        self.keys_by_size: dict[tuple[int, str | None], list[BlockKey]] = {}

    def common(self, other: "TokenPrompt") -> int:
        """Return the length of the common prefix of both prompts, in token ids."""
        mine = self.tokens
        theirs = other.tokens
        low = 0
        high = min(self.count, other.count)
        if mine[: high * ITEM] == theirs[: high * ITEM]:
            return high
        while low + 1 < high:  # the first ``low`` are equal, and the first ``high`` are not
            middle = (low + high) // 2
            if mine[low * ITEM : middle * ITEM] == theirs[low * ITEM : middle * ITEM]:
                low = middle
            else:
                high = middle
        return low

    def adopt_keys(self, other: "TokenPrompt", count: int) -> None:
        """Take over another prompt's keys for the common prefix of ``count`` ids."""
        if self.salts != other.salts:
            return
        for (size, lora), keys in other.keys_by_size.items():
            self.keys_by_size[size, lora] = keys[: count // size]

    def keys(self, size: int, lora: str | None) -> list[BlockKey]:
        """Return the keys so far for blocks of this size; ``more`` adds the next one."""
        keys = self.keys_by_size.get((size, lora))
        if keys is None:
            keys = self.keys_by_size[size, lora] = []
        return keys

    def more(self, keys: list[BlockKey], size: int, lora: str | None) -> BlockKey:
        """Add the next key to ``keys`` (the list that `keys` returned), and return it.

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
    """Parse a prompt's JSON; None: no list of token ids, or its blocks depend on other fields."""
    if len(prompt) > PROMPT_MOST or not prompt or not is_plain(context):
        return None
    if (prompt[0] != _BRACKET or prompt[1] not in _DIGITS) and not _begins_with_digit(
        bytes(prompt[:64])
    ):
        return None
    ids = packed_json(bytes(prompt).strip(_SPACES))
    return None if ids is None else prompt_of(ids, context)


def is_plain(context: Mapping[str, msgspec.Raw]) -> bool:
    """Tell whether a prompt's blocks depend only on its token ids, its salt and its adapter."""
    for name in _OTHER_CONTENT:  # noqa: SIM110 (a generator takes twice as long)
        if name in context and context[name] != NULL:
            return False
    return True


def prompt_of(ids: Sequence[int], context: Mapping[str, msgspec.Raw]) -> TokenPrompt | None:
    """Return the prompt of a request with these fields; None: an invalid id or salt.

    ``ids``: may be packed.
    """
    raw_salt = context.get("cache_salt", NULL)
    salt = None if raw_salt == NULL else maybe(raw_salt, str)
    if salt is None and raw_salt != NULL:
        return None
    try:
        return TokenPrompt(ids, salt)
    except (OverflowError, TypeError):
        return None


def _begins_with_digit(start: bytes) -> bool:
    """Tell whether JSON begins like a list of numbers."""
    start = start.lstrip(_SPACES)
    if not start or start[0] != _BRACKET:
        return False
    inside = start[1:].lstrip(_SPACES)
    return bool(inside) and inside[0] in _DIGITS
