"""The setting of the store."""

from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import parse_qs, urlsplit

from pdrelay_proxy.declarations import Kind
from pdrelay_proxy.features.stores.store_url import split_prefix
from pdrelay_proxy.settings import ENGINES

MEMORY: Final = "memory"  # of each router by itself: no store in common
_REDIS: Final = ("redis", "rediss", "unix")
_KINDS: Final = ("file", "kubernetes", *_REDIS)


def _checked(text: str) -> str | None:
    kind, _, location = text.partition(":")
    parts = urlsplit(text)
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise ValueError(
            "a store's URL is shown by ps: put its password into the environment as "
            "PDRELAY_REDIS_PASSWORD"
        )
    if kind in _REDIS:
        split_prefix(text)  # raises ValueError
    return text if text == MEMORY or (location and kind in _KINDS) else None


Store = Annotated[
    str,
    Kind(
        "a store: write memory, file:PATH, kubernetes:CONFIGMAP or redis://host:port/0",
        "STORE",
        check=_checked,
    ),
]


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The choice."""

    # fmt: off
    store: Store = ENGINES.option(MEMORY,
        "where engines added at run time are kept: memory, file:PATH, kubernetes:[NAMESPACE/]CONFIGMAP or redis://...",
        chart="router.store.type")
    # fmt: on


SETTINGS: Final = StoreSettings
