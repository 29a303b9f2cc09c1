"""The metadata that all Kubernetes objects have."""

import re
from typing import Final

import msgspec

# The keys that Kubernetes allows for labels.
LABEL_KEY: Final = re.compile(
    r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)


class Meta(msgspec.Struct, rename="camel"):
    """The part of an object's metadata that the router reads."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
