"""The settings of KV events."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdrelay_proxy.declarations import ReusedKv
from pdrelay_proxy.settings import ENGINES


class KvEvents(StrEnum):
    """Whether the router follows the KV events of engines."""

    OFF = "off"
    AUTO = "auto"  # of each engine that has some; of others it knows only what it has sent


@dataclass(frozen=True, slots=True)
class KvEventSettings:
    """The choices."""

    # fmt: off
    kv_events: KvEvents = ENGINES.option(KvEvents.OFF,
        "auto: the policies prefix and expected_ttft go by the KV events of engines that publish them",
        reused=ReusedKv(KvEvents.AUTO, "KV events are not read"))
    # fmt: on


SETTINGS: Final = KvEventSettings
