"""The settings of the policy expected_ttft."""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.declarations import SomeSeconds
from pdrelay_proxy.settings import ENGINES

# it chooses both engines, so both legs name it
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
