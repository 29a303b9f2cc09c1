"""Has each prompt of a request with several go its own way."""

from typing import Final

from pdrelay_proxy.features.feature import Feature
from pdrelay_proxy.features.prompt_arrays.requests.array_claim import ArrayClaims
from pdrelay_proxy.requests.claims import CallClaims


class PromptArraysFeature(Feature):
    """Answers requests with several prompts, by a request for each."""

    def claims(self) -> CallClaims:
        """Return what tells such requests from others."""
        return ArrayClaims()


FEATURE: Final = PromptArraysFeature
