"""Tokens of prefill engines that clients may see: what the engines offer, and what one has made."""

from pdrelay_proxy.core.model import GenerationRequest, InstanceId, PrefillResult
from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.core.raw_json import Fields
from pdrelay_proxy.features.first_token.core.first_token import (
    FirstToken,
    asked_for_token,
    first_token,
    may_show,
    offered,
)
from pdrelay_proxy.features.first_token.schemas import FirstTokenOffer
from pdrelay_proxy.features.first_token.settings import FirstTokenFrom, FirstTokenSettings
from pdrelay_proxy.settings import Settings


class FirstTokens(StreamOpenings):
    """Knows what prefill engines offer: they say so in their answers."""

    __slots__ = ("_are_wanted", "_offers", "_settings")

    def __init__(self) -> None:
        # by engine: what it says, and what that means
        self._offers: dict[InstanceId, tuple[bytes, FirstTokenOffer]] = {}
        # those that were looked at last, and what they say
        self._settings: Settings | None = None
        self._are_wanted = False

    def are_wanted(self, settings: Settings, /) -> bool:
        """Tell whether clients shall get such tokens; each request asks that."""
        if settings is not self._settings:
            self._settings = settings
            chosen = settings.for_feature(FirstTokenSettings)
            self._are_wanted = chosen.first_token_from is FirstTokenFrom.PREFILL
        return self._are_wanted

    def prefill_fields(self, call: GenerationRequest, prefill: InstanceId, /) -> Fields | None:
        """Return what a prefill engine is asked for its token; None: the client may not see it, as
        far as the engine's earlier answers say.
        """
        known = self._offers.get(prefill)
        if known is None or not may_show(call.api, call.fields, known[1]):
            return None
        return asked_for_token(call.fields)

    def read_opening(
        self,
        call: GenerationRequest,
        prefill: InstanceId,
        handover: PrefillResult,
        /,
        *,
        is_asked: bool,
        is_auto: bool,
    ) -> FirstToken | None:
        """Return the token that the client gets; ``is_asked``: the engine was asked for it.

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
            if is_asked
            else None
        )

    def forget(self, prefill: InstanceId, /) -> None:
        """Forget an engine that has failed: what answers next at its address may offer nothing."""
        self._offers.pop(prefill, None)
