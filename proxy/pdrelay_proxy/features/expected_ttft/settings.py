"""The settings of the policy expected_ttft, and of the times that it measures."""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.declarations import SomeSeconds
from pdrelay_proxy.settings import ENGINES

# for both legs: the two engines whose first token is expected first
EXPECTED_TTFT: Final = "expected_ttft"


@dataclass(frozen=True, slots=True)
class ExpectedTtftSettings:
    """The choices."""

    # fmt: off
    max_decode_itl_s: SomeSeconds = ENGINES.option(0.0,
        "longest pause in its streams for which a decode engine computes a prompt alone; 0: with expected_ttft it "
        "serves only short prompts alone")
    # fmt: on


SETTINGS: Final = ExpectedTtftSettings
POLICIES: Final = (EXPECTED_TTFT,)
