"""The setting of moving streams."""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.declarations import Ratio
from pdrelay_proxy.settings import RETRIES


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """The choice."""

    # fmt: off
    move_above: Ratio | None = RETRIES.option(None,
        "share of a decode engine's KV cache in use from which some of its streams move to engines with room")
    # fmt: on


SETTINGS: Final = MoveSettings
