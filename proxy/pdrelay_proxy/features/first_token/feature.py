"""Has streams begin with the token of the prefill engine."""

from typing import Final

from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.features.feature import Feature
from pdrelay_proxy.features.first_token.requests.first_tokens import FirstTokens


class FirstTokenFeature(Feature):
    """Opens streams with it, where the settings say so and the engine offers it."""

    def openings(self) -> StreamOpenings:
        """Return what finds such tokens in the answers of prefill engines."""
        return FirstTokens()


FEATURE: Final = FirstTokenFeature
