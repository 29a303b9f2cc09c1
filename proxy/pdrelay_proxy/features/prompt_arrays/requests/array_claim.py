"""Requests with several prompts, as the router hears of them."""

from collections.abc import Sequence
from typing import Final

import msgspec

from pdrelay_proxy.core.admission.ticket import Ticket
from pdrelay_proxy.core.model import GenerationRequest, Role, SingleEngineReason
from pdrelay_proxy.core.routing.fleet_choice import FleetChoice
from pdrelay_proxy.core.routing.route import split_reason
from pdrelay_proxy.errors import BodyTooLarge, NoInstance
from pdrelay_proxy.features.prompt_arrays.core.prompt_arrays import one_of, prompts_of
from pdrelay_proxy.features.prompt_arrays.requests.prompt_array import (
    AT_ONCE_AT_MOST,
    PromptArray,
)
from pdrelay_proxy.requests.claims import CallClaims, Claim, NewPart
from pdrelay_proxy.requests.client_response import ClientResponse
from pdrelay_proxy.requests.intake import RequestPlan
from pdrelay_proxy.requests.life import RequestLife

# bytes of a part that is served, but for its prompt and the fields that all share
_PART_SIZE: Final = 16 * 1024
_PREFILL: Final = Role.PREFILL


class ArrayClaims(CallClaims):
    """Claims requests with several prompts."""

    __slots__ = ()

    def claim(self, call: GenerationRequest, /) -> Claim | None:
        """Return the prompts of a request that has several, all texts or all lists of token ids."""
        prompts = prompts_of(call.api, call.fields)
        return ArrayClaim(call, prompts) if prompts else None


class ArrayClaim(Claim):
    """The prompts of one request."""

    __slots__ = ("_call", "_prompts")

    def __init__(self, call: GenerationRequest, prompts: Sequence[msgspec.Raw]) -> None:
        self._call = call
        self._prompts = prompts

    @property
    def count(self) -> int:
        """A rate counts prompts."""
        return len(self._prompts)

    def charged_bytes(self, size: int, most: int, /) -> int:
        """Return how many bytes it is charged; ``size``: of its body; ``most``: of all requests.

        All parts share the bytes of its long fields, but each has two connections to engines, whose
        buffers may hold them, and a head and objects of its own. Raises BodyTooLarge: it would be
        more than the router may hold.
        """
        at_once = min(len(self._prompts), AT_ONCE_AT_MOST)
        beside = max(0, size - sum([len(memoryview(prompt)) for prompt in self._prompts]))
        charged = size + at_once * (beside + _PART_SIZE)
        if charged > most and beside > _PART_SIZE:
            raise BodyTooLarge(
                f"each of the {len(self._prompts)} prompts is sent with the other fields, which have {beside} bytes: "
                f"for {at_once} prompts at a time that is more than the router may hold (max_inflight_bytes)"
            )
        return min(charged, most)

    def single_reason(self, fleet: FleetChoice, *, may_be_alone: bool) -> SingleEngineReason | None:
        """Say why one engine gets all prompts: one prompt could not be split, or there is no
        prefill engine.
        """
        first = self.first_call()
        reason = split_reason(fleet, first.api, first.fields)
        if reason is not None or not may_be_alone:
            return reason
        try:
            fleet.usable(_PREFILL)
        except NoInstance:
            return SingleEngineReason.NO_PREFILL
        return None

    def first_call(self) -> GenerationRequest:
        """Return the request for the first prompt."""
        call = self._call
        return GenerationRequest(
            call.api, one_of(call.fields, self._prompts[0]), call.headers, call.rank
        )

    def rule(self, first: str, /) -> str:
        """Say what becomes of the prompts."""
        return f"each of {len(self._prompts)} prompts by itself, the first: {first}"

    def begin(
        self,
        life: RequestLife,
        client: ClientResponse,
        plan: RequestPlan,
        ticket: Ticket,
        *,
        new_part: NewPart,
    ) -> PromptArray:
        """Begin to serve each prompt by itself."""
        return PromptArray(
            life, client, plan, self._call, ticket, prompts=self._prompts, new_part=new_part
        )
