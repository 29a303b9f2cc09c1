"""The metadata that all Kubernetes objects have."""

import msgspec


class Meta(msgspec.Struct, rename="camel"):
    """The part of an object's metadata that the router reads."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
