"""The hook for what learns the token ids of prompts: prefill engines tell them if they are asked
(return_token_ids).
"""

from pdrelay_proxy.core.model import GenerationRequest, RoutingHints
from pdrelay_proxy.core.schemas import TokensAnswer


class PromptIdReader:
    """Has them told.

    No call may wait or raise. A class, because a compiled call of a Protocol is slow.
    """

    def wants_ids(self, call: GenerationRequest, hints: RoutingHints, /) -> bool:
        """Tell whether a prefill engine shall tell the ids of a prompt that it gets next."""
        del call, hints
        return False

    def ids_told(self, hints: RoutingHints, answer: TokensAnswer | None, /) -> None:
        """A prefill engine that was asked has answered; None: its answer cannot be read."""
