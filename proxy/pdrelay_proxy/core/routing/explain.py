"""What would become of a request now: the engines, the rule that sends it there, and what each of them would get."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import msgspec

from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet.missing_paths import MissingPaths
from pdrelay_proxy.core.fleet.pair_modes import PairModes
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.model import (
    Api,
    GenerationRequest,
    Instance,
    InstanceId,
    LegOrder,
    RequestId,
    Role,
    RoutingHints,
    SingleEngineReason,
    TransferId,
)
from pdrelay_proxy.core.protocol import push, request_bodies
from pdrelay_proxy.core.protocol.disaggregation import may_share, solo_reason
from pdrelay_proxy.core.protocol.prompt_arrays import one_of, prompts_of
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.core.raw_json import TRUE, encode, text
from pdrelay_proxy.core.routing.pairing import PairSelector
from pdrelay_proxy.core.routing.routing_hints import TELLS_MODEL, ask_of_call, model_of, with_model
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import NoInstance, NoMatchingInstance
from pdrelay_proxy.settings import Settings

Terms: TypeAlias = Mapping[str, int | Mapping[InstanceId, int] | Mapping[InstanceId, str]]  # by name; caches by engine
_REQUEST: Final = RequestId("pdrelay-explained")  # a real request has another id
_TRANSFER: Final = TransferId("xfer-explained")  # and another one here


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer; of a request that one engine serves, the prefill side is None."""

    rule: str
    prefill: Instance | None
    decode: Instance
    prefill_body: bytes | None
    decode_body: bytes  # while the prefill engine has not answered, with words in place of its kv_transfer_params
    expected: ExpectedTime | None = None  # what its engines were chosen by; None: no policy asks for it
    bound: str | None = None  # what became of it, as a decode engine leaves it to others that has nearly all of it


class KnownCaches(Protocol):
    """What engines have in their caches, as far as is known."""

    def by_engine(self, ask: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many bytes of the prompt each engine has, of those that have some."""
        ...

    def tokens_by_engine(self, ask: RoutingHints, /) -> Mapping[InstanceId, int]:
        """Return how many tokens of the prompt each engine has by its own events, of those that tell."""
        ...

    def sources_by_engine(self, ask: RoutingHints, /) -> Mapping[InstanceId, str]:
        """Return how it is known what each engine has."""
        ...


@dataclass(frozen=True, slots=True)
class Explainer:
    """Says what the relay would do. What it rehearses with is a copy, so that asking changes nothing."""

    rehearsal: Callable[[], PairSelector]
    usable: Callable[[Role], Sequence[Instance]]  # raises NoInstance
    learned: PushCoordinates
    settings: Callable[[], Settings]
    sessions: SessionIds
    shares_loads: Callable[[], bool]  # decode engines load a prompt once for several answers
    missing: MissingPaths  # which engines lack a path
    caches: KnownCaches | None = None  # None: no policy asks for them
    modes: PairModes | None = None  # of pairs that can pull and push
    passes_ids: Callable[[GenerationRequest, Instance], bool] = lambda _call, _decode: False  # to a decode engine
    clock: Callable[[], float] = lambda: 0.0  # seconds; the one of the registry's times
    model_of_unnamed: Callable[[], str | None] | None = None  # as for requests (requests/intake.py)

    def explain(self, call: GenerationRequest) -> Explanation:
        """Say what would become of a request now.

        Raises:
            NoInstance, UnknownModel, BadRequest, PathNotServed: it would be refused.
        """
        call, is_known = self._named(call)
        hints = ask_of_call(call)
        self.missing.check(call.api, hints, now=self.clock())
        if not is_known:
            decode = self.usable(Role.DECODE)
            rule = f"single: {SingleEngineReason.UNKNOWN_MODEL}"
            chosen = self.rehearsal().one(self._offering(call.api, decode) or decode, hints)
            return Explanation(rule, None, chosen, None, encode(call.fields))
        if prompts := prompts_of(call.api, call.fields):
            return self._explain_first(call, prompts)
        pairing = self.rehearsal()
        found = self._explain_one(call, pairing)
        return found if pairing.bound is None else replace(found, bound=pairing.bound.outcome)

    def _named(self, call: GenerationRequest) -> tuple[GenerationRequest, bool]:
        """Return a request with the model that it means; False: one engine serves it, for it is not known which one.

        Raises BadRequest: it must name one.
        """
        if self.model_of_unnamed is None or model_of(call.fields) is not None:
            return call, True
        model = self.model_of_unnamed()
        if model is None:
            return call, call.api in TELLS_MODEL
        fields = with_model(call.api, call.fields, model)
        return GenerationRequest(call.api, fields, call.headers, call.rank), True

    def _explain_one(self, call: GenerationRequest, pairing: PairSelector) -> Explanation:
        decode, settings = self.usable(Role.DECODE), self.settings()
        ask = ask_of_call(call, self.sessions.of(dict(reversed(call.headers)), call.fields))
        why: str | None = solo_reason(call.api, call.fields)
        if why == SingleEngineReason.N and may_share(call.api, call.fields) and self.shares_loads():
            why = None
        if why is None:
            why, _ = pairing.small(decode, ask, settings.min_split_new_bytes)
        if why is None:
            try:
                found = self._explain_pair(call, pairing, decode, ask)
                if found is not None:
                    return found
                why = SingleEngineReason.FASTER
            except NoMatchingInstance as exc:
                if not settings.decode_only_fallback:
                    raise
                why = f"{SingleEngineReason.NO_MATCH} ({exc})"
            except NoInstance:
                if not settings.decode_only_fallback:
                    raise
                why = SingleEngineReason.NO_PREFILL
        chosen = pairing.one(self._offering(call.api, decode) or decode, ask)
        return Explanation(f"single: {why}", None, chosen, None, encode(call.fields), pairing.expected)

    def _explain_pair(
        self, call: GenerationRequest, pairing: PairSelector, decode: Sequence[Instance], ask: RoutingHints
    ) -> Explanation | None:
        """Say which two engines would serve a request, or which one in its turn; None: one alone is faster."""
        prefills = self.usable(Role.PREFILL)
        if pairing.is_faster_alone(prefills, decode, ask):
            return None
        tried = None if self.missing.is_denied(call.api) else pairing.rested_pair(prefills, decode, ask, self.clock())
        decode = self._offering(call.api, decode)
        prefills = self._offering(call.api, prefills)
        if not (prefills and decode):
            raise NoInstance(f"no two instances that can take a request now have {call.api}")
        if tried is not None:
            return replace(self._split(call, *tried), expected=pairing.expected)
        may_be_alone = self.settings().decode_only_fallback
        prefill, chosen = pairing.pair(prefills, decode, ask, may_be_alone=may_be_alone)
        if prefill is not None:
            return replace(self._split(call, prefill, chosen), expected=pairing.expected)
        why = f"single: {SingleEngineReason.FEW_MATCH}"
        return Explanation(why, None, chosen, None, encode(call.fields), pairing.expected)

    def _offering(self, path: str, among: Sequence[Instance]) -> Sequence[Instance]:
        """Leave out the engines that lack a path."""
        return self.missing.offering(path, among, now=self.clock())

    def _explain_first(self, call: GenerationRequest, prompts: Sequence[msgspec.Raw]) -> Explanation:
        """Say what would become of several prompts: each goes its own way if the first one would be split."""
        one = GenerationRequest(call.api, one_of(call.fields, prompts[0]), call.headers, call.rank)
        found = self.explain(one)
        if found.prefill is not None:
            return replace(found, rule=f"each of {len(prompts)} prompts by itself, the first: {found.rule}")
        return replace(found, rule=f"single: {SingleEngineReason.PROMPTS}", decode_body=encode(call.fields))

    def terms(self, call: GenerationRequest) -> Terms:
        """Return the numbers that decide whether the request is split."""
        least, ask = self.settings().min_split_new_bytes, ask_of_call(call)
        bound, nothing = self.rehearsal().bound, dict[InstanceId, int]()
        unknown: Mapping[InstanceId, str] = {}
        return {
            "prompt_bytes": len(ask.prompt),
            "cached_bytes": nothing if self.caches is None else self.caches.by_engine(ask),
            "cached_tokens": nothing if self.caches is None else self.caches.tokens_by_engine(ask),
            "cached_known_by": unknown if self.caches is None else self.caches.sources_by_engine(ask),
            "min_split_new_bytes": least,
            "lone_prompt_bytes": nothing if bound is None else bound.lone_bytes(),
        }

    def _split(self, call: GenerationRequest, prefill: Instance, decode: Instance) -> Explanation:
        fields = request_bodies.named(call.api, call.fields, _REQUEST)
        told = self.learned.coordinates(prefill.id)
        mode = None if self.modes is None else self.modes.get((prefill.id, decode.id))
        if mode is not None and mode.chosen is TransferMode.PULL:
            told = None
        asked, answered = request_bodies.prefill_fields(call.api, fields, _TRANSFER), fields
        if told is not None:
            params = push.decode_params(told, call.api, _REQUEST, _TRANSFER)
        else:
            params = text(f"those that {prefill.id} answers with")
            if self.settings().reuse_prompt_tokens and self.passes_ids(call, decode):
                asked["return_token_ids"] = TRUE
                if call.api is Api.COMPLETIONS:  # of a chat they are among the parameters
                    answered = fields | {"prompt": text(f"the token ids that {prefill.id} answers with")}
        if self.model_of_unnamed is not None and call.api in TELLS_MODEL and model_of(call.fields) is None:
            answered = answered | {"model": text(f"the one that {prefill.id} answers with")}
        return Explanation(
            "prefill first, then decode" if told is None else f"both legs at once ({LegOrder.CONCURRENT})",
            prefill,
            decode,
            encode(asked),
            request_bodies.decode_body(answered, msgspec.Raw(params)),
        )
