"""Tokens of prefill engines that clients may see: what the engines offer, and what one has made."""

from pdrelay_proxy.core.model import GenerationRequest, InstanceId, PrefillResult
from pdrelay_proxy.core.protocol.first_token import FirstToken, first_token, may_show, offered
from pdrelay_proxy.core.schemas import FirstTokenOffer


class FirstTokens:
    """Knows what prefill engines offer: they say so in their answers."""

    __slots__ = ("_offers",)

    def __init__(self) -> None:
        # by engine: what it says, and what that means
        self._offers: dict[InstanceId, tuple[bytes, FirstTokenOffer]] = {}

    def may_show(self, call: GenerationRequest, prefill: InstanceId) -> bool:
        """Tell whether the client may see the token of a prefill engine, as far as its earlier
        answers say.
        """
        known = self._offers.get(prefill)
        return known is not None and may_show(call.api, call.fields, known[1])

    def read(
        self,
        call: GenerationRequest,
        prefill: InstanceId,
        handover: PrefillResult,
        *,
        shows: bool,
        is_auto: bool = False,
    ) -> FirstToken | None:
        """Return the token that the client gets; ``shows``: the engine was asked for it.

        Remember what is offered. ``is_auto``: the engine can do either, and offers nothing where it
        pushes.
        """
        written = bytes(handover.offer)
        known = self._offers.get(prefill)
        if known is not None and known[0] == written:
            offer = known[1]
        elif (new_offer := offered(handover.offer)) is not None:
            offer = new_offer
            self._offers[prefill] = written, offer
        else:
            if not is_auto:
                self.forget(prefill)
            return None
        return (
            first_token(call.api, call.fields, offer, handover.read, handover.counted)
            if shows
            else None
        )

    def forget(self, prefill: InstanceId) -> None:
        """Forget an engine that has failed: what answers next at its address may offer nothing."""
        self._offers.pop(prefill, None)
