"""The setting of first tokens."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdrelay_proxy.settings import ENGINES


class FirstTokenFrom(StrEnum):
    """Which engine generates the first token that the client of a stream gets."""

    DECODE = "decode"  # always the decode engine
    # if the decode engine can continue it exactly; otherwise the decode engine
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class FirstTokenSettings:
    """The choice."""

    # fmt: off
    first_token_from: FirstTokenFrom = ENGINES.option(FirstTokenFrom.DECODE,
        "prefill: clients of streams get the prefill engine's token at once, where the decode engine can continue "
        "exactly", live=True)
    # fmt: on


SETTINGS: Final = FirstTokenSettings
