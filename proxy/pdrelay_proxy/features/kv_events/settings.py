"""The settings of KV events."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdrelay_proxy.declarations import ReusedKv
from pdrelay_proxy.settings import ENGINES


class KvEvents(StrEnum):
    """Whether the router asks engines what they have cached."""

    OFF = "off"
    AUTO = "auto"  # each engine that tells it; of the others the router knows what it has sent


@dataclass(frozen=True, slots=True)
class KvEventSettings:
    """The choices."""

    # fmt: off
    kv_events: KvEvents = ENGINES.option(KvEvents.OFF,
        "auto: the policies prefix and expected_ttft go by the KV events of engines that publish them",
        reused=ReusedKv(KvEvents.AUTO, "KV events are not read"))
    # fmt: on


SETTINGS: Final = KvEventSettings
