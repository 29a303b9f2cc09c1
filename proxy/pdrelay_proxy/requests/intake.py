"""From a head and a body to a plan: who asks, whether they may, and what the engines are asked.

Nothing is counted here and nothing waits. What is wrong with a request is raised, for the client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdrelay_proxy.core.admission.cache_salts import Salts
from pdrelay_proxy.core.admission.keys import ANYBODY, Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.admission.priority import limited
from pdrelay_proxy.core.admission.prompt_estimate import MEDIUM_TOKENS, prompt_tokens
from pdrelay_proxy.core.http.content_codings import Coding, coding_of, decoded
from pdrelay_proxy.core.http.multipart import boundary_of, check_form, content_type
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.core.model import (
    Api,
    GenerationRequest,
    Headers,
    Instance,
    Role,
    RoutingHints,
    SingleEngineReason,
)
from pdrelay_proxy.core.protocol.asked_usage import asking_for_usage
from pdrelay_proxy.core.protocol.client_body import (
    CLEANED,
    TEMPLATES,
    check_chat_template,
    check_wanted_now,
    parse,
)
from pdrelay_proxy.core.protocol.client_media import ANY_HOST, check_media
from pdrelay_proxy.core.protocol.disaggregation import PROMPTS
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, UNCACHED, EndpointKind
from pdrelay_proxy.core.protocol.response_filter import media_type
from pdrelay_proxy.core.raw_json import FALSE, TRUE, Fields, Pieces, encode, long_fields, to_raw
from pdrelay_proxy.core.routing.routing_hints import (
    TELLS_MODEL,
    hints_of_call,
    model_of,
    rank_of,
    with_model,
)
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import BodyTooLarge, UnsupportedMedia
from pdrelay_proxy.settings import Settings

JSON_TYPE: Final = b"application/json"
# Authorization is missing on purpose: a client's key is one of this router. So is X-Request-Id:
# engines match the halves of a request by it, so it must be ours and unique.
PASSED_ON: Final = frozenset(
    {b"traceparent", b"tracestate", b"baggage", b"x-session-id", b"x-vllm-priority"}
)
# bytes of a body; of a smaller one it costs less to copy its fields than to share them
_LARGE: Final = 64 * 1024
_RANK: Final = b"x-data-parallel-rank"
_REASONING: Final = "include_reasoning"
_FORM_TYPE: Final = b"multipart/form-data"
_FORMS: Final = frozenset(path for path, kind in ENDPOINTS.items() if kind is EndpointKind.FORM)
_APIS: Final = {api.value: api for api in Api}
# a body without its coding, its fields, and about how many tokens its prompt has: of a form, or
# where they count
ExaminedBody: TypeAlias = tuple[bytes, Fields, int | None]


class RequestHead:
    """The head of a request for an endpoint; names of headers are in lower case."""

    __slots__ = ("caller", "coding", "headers", "path", "shown")

    def __init__(
        self,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        shown: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """``shown``: the headers by name, of several the first; None: they are made here."""
        self.path = path
        self.caller = ANYBODY  # the name of the client's key, once the head is judged
        # of the body, once the head is judged; None: it is not compressed
        self.coding: Coding | None = None
        self.headers = headers
        self.shown: Mapping[bytes, bytes] = dict(reversed(headers)) if shown is None else shown


@dataclass(slots=True, init=False)
class RequestPlan:
    """What the engines are asked. It does not change, but for a model that is learned."""

    path: str
    headers: Headers  # those of the client's headers that engines may see
    hints: RoutingHints  # what the choice of engines may depend on
    streams: bool
    # its stream has pauses of any length: vLLM sends nothing for reasoning that is not wanted
    may_be_quiet: bool
    # of an endpoint that generates text; None: one engine gets ``body``
    call: GenerationRequest | None
    body: Pieces
    content_type: bytes
    priority: int
    tokens: int | None  # about how many its prompt has; None: not looked at
    single_reason: SingleEngineReason | None  # why one engine gets all of it; None: not said
    # it names none, and which one it means is told by its prefill engine's answer
    learns_model: bool
    # its stream is asked for its usage, and the client did not
    hides_usage: bool
    # of the model that its stream has begun with; None: it has not, or no engine says
    files: str | None

    def __init__(  # noqa: PLR0917 (by name they cost 1,000 instructions more)
        self,
        path: str,
        headers: Headers,
        hints: RoutingHints,
        priority: int,
        call: GenerationRequest | None = None,
        tokens: int | None = None,
        *,
        body: Pieces | None = None,
        content_type: bytes = JSON_TYPE,
        single_reason: SingleEngineReason | None = None,
    ) -> None:
        self.path = path
        self.headers = headers
        self.hints = hints
        self.streams = call is not None and call.fields.get("stream") == TRUE
        self.may_be_quiet = call is not None and call.fields.get(_REASONING) == FALSE
        self.call = call
        self.body = [] if body is None else body
        self.content_type = content_type
        self.priority = priority
        self.tokens = tokens
        self.single_reason = single_reason
        self.learns_model = False
        self.hides_usage = False
        self.files = None

    def learn_model(self, model: str | None) -> None:
        """An engine has told which model is meant; None: which one it serves is not known."""
        self.hints = self.hints.for_model(model)

    def headers_for(self, engine: Instance) -> Headers:
        """Return the headers for one engine: with its rank, or with the client's for a decode
        engine without ranks.
        """
        rank = engine.rank
        if rank is None and engine.role is Role.DECODE:
            rank = self.hints.rank
        return self.headers if rank is None else (*self.headers, (_RANK, b"%d" % rank))


@dataclass(slots=True)
class Intake:
    """What a request is judged by before it is admitted."""

    settings: Settings
    lifetime: Lifetime
    keyring: Keyring
    sites: Sites
    salts: Salts | None = None
    sessions: SessionIds | None = None  # None: no policy asks for them
    media_hosts: frozenset[str] = frozenset()  # from which engines may fetch media, in lower case
    # Returns the model that a request means which names none; None: no engine has said what it
    # serves. Raises BadRequest: it must name one. Without it any engine may serve such a request.
    model_of_unnamed: Callable[[], str | None] | None = None
    # Where tokens count, streams are asked for their usage, once one has shown that engines do not
    # add it unasked (vLLM's --enable-force-include-usage): such a one is not the router's to hide.
    asks_for_usage: bool = False

    def check(self, head: RequestHead) -> str:
        """Judge a head; return the name of the client's key.

        Raises:
            CrossSite, Misdirected, UnsupportedMedia, ClosingDown, Unauthorized, BodyTooLarge: it is
            not let in.
        """
        headers = head.headers
        shown = head.shown
        has_keys = self.keyring.keys is not None
        is_elsewhere = not self.sites.admits(shown.get(b"host", b""), has_keys=has_keys)
        # from browsers
        if is_elsewhere or (not has_keys and (b"origin" in shown or b"sec-fetch-site" in shown)):
            self.sites.check("POST", tuple(headers), has_keys=has_keys)
        declared = shown.get(b"content-type")
        if not has_keys and not declared and b"x-api-key" not in shown:
            # The page of another web site could send an undeclared body unasked, and not that
            # header.
            raise UnsupportedMedia("the body is not declared: send Content-Type: application/json")
        self.lifetime.check()
        caller = self.keyring.caller(tuple(headers)) if has_keys else ANYBODY
        if declared != JSON_TYPE or head.path in _FORMS:
            _check_type(head.path, declared or b"")
        check_length(shown.get(b"content-length", b""), self.settings.max_body_bytes)
        if b"content-encoding" in shown:
            declared = b",".join([value for name, value in headers if name == b"content-encoding"])
            head.coding = coding_of(declared)
        return caller

    def read(self, head: RequestHead, body: bytes) -> Fields:
        """Read a body, of a form nothing but its model; a long one is read in a thread.

        Raises BadRequest.
        """
        if head.path in _FORMS:
            model = check_form(boundary_of(head.shown.get(b"content-type", b"")), body)
            return {} if model is None else {"model": to_raw(model)}
        settings = self.settings
        fields = parse(body)
        if not (settings.trust_request_chat_template or fields.keys().isdisjoint(TEMPLATES)):
            check_chat_template(fields)
        if self.keyring.keys is not None or self.media_hosts or settings.tls_client_ca is not None:
            self._check_media(fields)
        return fields

    def _check_media(self, fields: Fields) -> None:
        hosts = self.media_hosts if self.limits_media() else None
        is_kept_apart = self.salts is not None and self.salts.apply
        if hosts is not None or is_kept_apart:
            check_media(fields, hosts, may_have_ids=not is_kept_apart)

    def limits_media(self) -> bool:
        """Tell whether engines may fetch media from some hosts only, with the present keys."""
        if self.media_hosts:
            return ANY_HOST not in self.media_hosts
        return self.keyring.keys is not None or self.settings.tls_client_ca is not None

    def examine(self, head: RequestHead, body: bytes, *, counts_tokens: bool) -> ExaminedBody:
        """Read a body; raises BadRequest, BodyTooLarge."""
        if head.coding is not None:
            body = decoded(head.coding, body, self.settings.max_body_bytes)
        fields = self.read(head, body)
        tokens: int | None = None
        if head.path in _FORMS:
            tokens = MEDIUM_TOKENS
        elif counts_tokens:
            tokens = prompt_tokens(fields, len(body))
        return body, fields, tokens

    def plan(
        self, head: RequestHead, body: bytes, fields: Fields, tokens: int | None = None
    ) -> RequestPlan:
        """Say what the engines are asked; raises BadRequest.

        A request that names no model means the one that all engines serve, for as long as it lasts.
        ``tokens``: about how many the prompt has.
        """
        path = head.path
        shown = head.shown
        api = _APIS.get(path)
        if api is not None:
            check_wanted_now(api, fields)
        engine_headers = () if shown.keys().isdisjoint(PASSED_ON) else passed_on(head.headers)
        engine_headers, fields_sent, priority = limited(
            engine_headers, fields, self.keyring.least_of(head.caller)
        )
        if self.keyring.keys is not None and self.salts is not None and self.salts.apply:
            has_prompt = path not in UNCACHED and path not in _FORMS
            fields_sent = self.salts.salted(fields_sent, head.caller) if has_prompt else fields_sent
        session = None if self.sessions is None else self.sessions.of(shown, fields)
        rank = rank_of(shown[_RANK]) if _RANK in shown else None
        model = model_of(fields)
        is_unknown = False
        if model is None and self.model_of_unnamed is not None:
            model = self.model_of_unnamed()
            is_unknown = model is None
            if api is not None and model is not None:
                fields_sent = with_model(api, fields_sent, model)
        if api is not None and (not is_unknown or api in TELLS_MODEL):
            asked = None
            if self.asks_for_usage and tokens is not None:
                asked = asking_for_usage(api, fields_sent)
                fields_sent = asked or fields_sent
            shared = _shared(api, fields_sent) if len(body) > _LARGE else ()
            call = GenerationRequest(api, fields_sent, engine_headers, rank, shared)
            plan = RequestPlan(
                path, engine_headers, hints_of_call(call, session, model), priority, call, tokens
            )
            plan.learns_model = is_unknown
            plan.hides_usage = asked is not None
            return plan
        sent_type = JSON_TYPE
        if path in _FORMS:
            sent_type = content_type(boundary_of(shown.get(b"content-type", b"")))
        elif api is not None or fields_sent is not fields or not CLEANED.isdisjoint(fields):
            body = encode(fields_sent)
        plan = RequestPlan(
            path,
            engine_headers,
            RoutingHints(model, session, rank=rank),
            priority,
            body=[body],
            content_type=sent_type,
            tokens=tokens,
            single_reason=SingleEngineReason.ONE_LEG
            if api is None
            else SingleEngineReason.UNKNOWN_MODEL,
        )
        plan.streams = api is not None and fields_sent.get("stream") == TRUE
        return plan


def passed_on(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that engines may see, as they came; names are in lower case."""
    return tuple([header for header in headers if header[0] in PASSED_ON])


def _shared(api: Api, fields: Fields) -> Sequence[str]:
    """Return the fields with long values, but for the prompt."""
    return [name for name in long_fields(fields) if name != PROMPTS[api]]


def _check_type(path: str, declared: bytes) -> None:
    """Accept a body that is declared as what the endpoint reads; JSON need not be declared.

    Raises:
        UnsupportedMedia: it is declared as something else.
    """
    if path not in _FORMS:
        check_json(declared)
        return
    if media_type(declared) != _FORM_TYPE:
        raise UnsupportedMedia(
            f"the body must be multipart/form-data, not "
            f"{declared.decode('latin-1') or 'undeclared'}"
        )
    boundary_of(declared)  # raises UnsupportedMedia


def check_json(declared: bytes) -> None:
    """Accept a body that is declared as JSON, or not declared at all; raises UnsupportedMedia."""
    if declared and media_type(declared) != JSON_TYPE:
        raise UnsupportedMedia(
            f"the body must be application/json, not {declared.decode('latin-1')}"
        )


def too_long(most: int) -> BodyTooLarge:
    """Return the error for a body that turned out to have more than so many bytes."""
    return BodyTooLarge(f"the body has more than {most} bytes, the most this router takes")


def check_length(declared: bytes, most: int) -> None:
    """Accept the Content-Length of a body that may have so many bytes; raises BodyTooLarge."""
    if declared.isdigit() and int(declared) > most:
        raise BodyTooLarge(
            f"the body has {int(declared)} bytes, and {most} is the most this router takes"
        )
