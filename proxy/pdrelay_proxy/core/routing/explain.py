"""What would become of a request now: the engines, the rule that sends it there, and what each of
them would get.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import msgspec

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.model import (
    Api,
    GenerationRequest,
    Instance,
    InstanceId,
    LegOrder,
    RequestId,
    RoutingHints,
    SingleEngineReason,
    TransferId,
)
from pdrelay_proxy.core.protocol import push, request_bodies
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.raw_json import TRUE, encode, to_raw
from pdrelay_proxy.core.routing.claimed_call import ClaimedCall
from pdrelay_proxy.core.routing.fleet_choice import FleetChoice
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.core.routing.route import Route, route, split_reason, told_ahead
from pdrelay_proxy.core.routing.routing_hints import (
    TELLS_MODEL,
    hints_of_call,
    model_of,
    with_model,
)
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.settings import Settings

# by name; caches by engine
Terms: TypeAlias = Mapping[str, int | Mapping[InstanceId, int] | Mapping[InstanceId, str]]
_REQUEST: Final = RequestId("pdrelay-explained")  # a real request has another id
_TRANSFER: Final = TransferId("xfer-explained")  # and another one here


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer; of a request that one engine serves, the prefill side is None."""

    rule: str
    prefill: Instance | None
    decode: Instance
    prefill_body: bytes | None
    # while the prefill engine has not answered, with words in place of its kv_transfer_params
    decode_body: bytes
    # what its engines were chosen by; None: no policy asks for it
    expected: ExpectedTime | None = None
    # what became of it, as a decode engine leaves it to others that has nearly all of it
    bound: str | None = None


class KnownCaches(Protocol):
    """What engines have in their caches, as far as is known."""

    def by_engine(self, hints: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many bytes of the prompt each engine has, of those that have some."""
        ...

    def tokens_by_engine(self, hints: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many tokens of the prompt engines have, by their own events."""
        ...

    def sources_by_engine(self, hints: RoutingHints, /) -> Mapping[InstanceId, str]:
        """Return how it is known what each engine has."""
        ...


@dataclass(frozen=True, slots=True)
class Explainer:
    """Says what the relay would do.

    What it rehearses with leaves no trace, so that asking changes nothing.
    """

    rehearsal: Callable[[], FleetChoice]
    learned: PushCoordinates
    settings: Callable[[], Settings]
    sessions: SessionIds
    # the model of a prefill engine, as its answers have told; None: none has yet
    model_of: Callable[[InstanceId], str | None]
    caches: KnownCaches | None = None  # None: no policy asks for them
    # to a decode engine
    passes_ids: Callable[[GenerationRequest, Instance], bool] = lambda _call, _decode: False
    model_of_unnamed: Callable[[], str | None] | None = None  # as for requests (requests/intake.py)
    claim: Callable[[GenerationRequest], ClaimedCall | None] | None = None  # of a feature, likewise

    def explain(self, call: GenerationRequest) -> Explanation:
        """Say what would become of a request now.

        Raises:
            NoInstance, UnknownModel, BadRequest, PathNotServed: it would be refused.
        """
        call, is_known = self._named(call)
        fleet = self.rehearsal()
        fleet.check_path(call.api, hints_of_call(call))
        if not is_known:
            return self._explain_one(fleet, call, SingleEngineReason.UNKNOWN_MODEL)
        claimed = None if self.claim is None else self.claim(call)
        if claimed is None:
            return self._explain_one(fleet, call, split_reason(fleet, call.api, call.fields))
        may_be_alone = self.settings().decode_only_fallback
        reason = (
            SingleEngineReason.UNKNOWN_MODEL
            if self._is_unnamed(call)
            else claimed.single_reason(fleet, may_be_alone=may_be_alone)
        )
        if reason is not None:
            return self._explain_one(fleet, call, reason)
        first = claimed.first_call()
        explanation = self._explain_one(fleet, first, split_reason(fleet, first.api, first.fields))
        return replace(explanation, rule=claimed.rule(explanation.rule))

    def _named(self, call: GenerationRequest) -> tuple[GenerationRequest, bool]:
        """Return a request with the model that it means; False: one engine serves it, for it is not
        known which one.

        Raises BadRequest: it must name one.
        """
        if self.model_of_unnamed is None or model_of(call.fields) is not None:
            return call, True
        model = self.model_of_unnamed()
        if model is None:
            return call, call.api in TELLS_MODEL
        fields = with_model(call.api, call.fields, model)
        return call.with_fields(fields), True

    def _is_unnamed(self, call: GenerationRequest) -> bool:
        """Tell whether an engine has to say which model a request means."""
        return self.model_of_unnamed is not None and model_of(call.fields) is None

    def _explain_one(
        self, fleet: FleetChoice, call: GenerationRequest, reason: SingleEngineReason | None
    ) -> Explanation:
        """Say which engines would serve a request; ``reason``: why it must be one, if the request
        itself says so.
        """
        hints = hints_of_call(call, self.sessions.of(dict(reversed(call.headers)), call.fields))
        chosen = route(fleet, hints, call.api, RetryAttempts(0), self.settings(), reason=reason)
        bound = None if fleet.pairs.bound is None else fleet.pairs.bound.outcome
        if chosen.prefill is not None:
            return replace(
                self._split(call, chosen.prefill, chosen), expected=chosen.expected, bound=bound
            )
        rule = f"single: {chosen.reason}"
        if chosen.why_no_match:
            rule = f"{rule} ({chosen.why_no_match})"
        body = encode(request_bodies.named(call.api, call.fields, _REQUEST))
        return Explanation(rule, None, chosen.decode, None, body, chosen.expected, bound)

    def terms(self, call: GenerationRequest) -> Terms:
        """Return the numbers that decide whether the request is split."""
        least = self.settings().min_split_new_bytes
        hints = hints_of_call(call)
        bound = self.rehearsal().pairs.bound
        caches = self.caches
        return {
            "prompt_bytes": len(hints.prompt),
            "cached_bytes": {} if caches is None else caches.by_engine(hints),
            "cached_tokens": {} if caches is None else caches.tokens_by_engine(hints),
            "cached_known_by": {} if caches is None else caches.sources_by_engine(hints),
            "min_split_new_bytes": least,
            "lone_prompt_bytes": {} if bound is None else bound.lone_bytes(),
        }

    def _split(self, call: GenerationRequest, prefill: Instance, chosen: Route) -> Explanation:
        fields = request_bodies.named(call.api, call.fields, _REQUEST)
        learns_model = self._is_unnamed(call) and call.api in TELLS_MODEL
        model = self.model_of(prefill.id) if learns_model else None
        coordinates = told_ahead(
            prefill.id, chosen.mode, self.learned, needs_model=learns_model and model is None
        )
        if coordinates is not None and model is not None:
            fields = with_model(call.api, fields, model)
        prefill_fields = request_bodies.prefill_fields(
            call.api, fields, _TRANSFER, pushes=chosen.mode is TransferMode.PUSH
        )
        decode_fields = fields
        if coordinates is not None:
            params = push.decode_params(coordinates, call.api, _REQUEST, _TRANSFER)
        else:
            params = to_raw(f"those that {prefill.id} answers with")
            if self.passes_ids(call, chosen.decode):
                prefill_fields["return_token_ids"] = TRUE
                if call.api is Api.COMPLETIONS:  # of a chat they are among the parameters
                    decode_fields = fields | {
                        "prompt": to_raw(f"the token ids that {prefill.id} answers with")
                    }
            if learns_model:
                decode_fields = decode_fields | {
                    "model": to_raw(f"the one that {prefill.id} answers with")
                }
        return Explanation(
            "prefill first, then decode"
            if coordinates is None
            else f"both legs at once ({LegOrder.CONCURRENT})",
            prefill,
            chosen.decode,
            encode(prefill_fields),
            request_bodies.decode_body(decode_fields, msgspec.Raw(params)),
        )
