"""The part of a prefill leg that names the decode engine which has KV of the conversation already.

Our connector alone reads it (``return_kv``,
``connector/pdrelay_connector/shell/returned_prefixes.py``). Other engines ignore fields of
``kv_transfer_params`` that they do not know.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from pdrelay_proxy.core.raw_json import encode_text

_ADDED: Final = b',"pdrelay_cached_on":%b,"pdrelay_cached_share":%.3f}'


@dataclass(frozen=True, slots=True)
class CachedOn:
    """A decode engine, and how much of the prompt its cache seems to have."""

    engine_id: str  # the id by which other engines know it
    share: float  # 0 to 1, of the prompt's bytes


def naming(params: msgspec.Raw, cached_on: CachedOn) -> msgspec.Raw:
    """Return the params of a prefill leg, an object with members, with the engine added."""
    return msgspec.Raw(
        bytes(params)[:-1] + _ADDED % (encode_text(cached_on.engine_id), cached_on.share)
    )
