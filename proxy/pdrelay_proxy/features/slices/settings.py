"""The setting of slices."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdrelay_proxy.settings import ENGINES


class SlicePairing(StrEnum):
    """Whether the two engines of a request are of one slice: one zone, rack or NVLink domain."""

    OFF = "off"  # slices play no part
    PREFER = "prefer"  # another slice takes part only where one lacks engines of a role
    # never two slices; an engine without a slice pairs with those that have none either
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """The choice."""

    # fmt: off
    slice_pairing: SlicePairing = ENGINES.option(SlicePairing.OFF,
        "whether both engines of a request must be of one slice (a zone, rack or NVLink domain)")
    # fmt: on


SETTINGS: Final = SliceSettings
