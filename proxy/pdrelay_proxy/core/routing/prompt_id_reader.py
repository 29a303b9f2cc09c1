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
        """Tell whether an engine shall tell the ids of a prompt: a prefill leg is about to be
        sent.
        """
        del call, hints
        return False

    def ids_told(self, hints: RoutingHints, answer: TokensAnswer | None, /) -> None:
        """A prefill engine has answered that was asked for them; None: the answer cannot be
        read.
        """
