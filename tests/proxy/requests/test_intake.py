"""What a request is judged by before it is admitted."""

import json

import pytest

from pdrelay_proxy.core.admission.keys import Keyring, Keys
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind
from pdrelay_proxy.core.raw_json import encode
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import BadRequest, UnsupportedMedia
from pdrelay_proxy.requests.intake import Intake, RequestHead, passed_on
from pdrelay_proxy.settings import Settings

FORM = "/v1/audio/transcriptions"


def intake(**options):
    return Intake(Settings(**options), Lifetime(), Keyring(), Sites(Settings()))


def head(path="/v1/completions", **headers):
    return RequestHead(path, [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])


def planned(asked, **options):
    body = b'{"prompt": "a"}'
    made = intake(**options)
    return made.plan(asked, body, made.read(asked, body))


@pytest.mark.parametrize(("text", "rank"), [("0", 0), (" 12 ", 12), ("", None)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_client_may_ask_for_a_rank(path, text, rank):
    """An empty header asks for nothing."""
    assert planned(head(path, x_data_parallel_rank=text)).hints.rank == rank


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_an_engine_is_chosen_by_the_model_and_the_session(path):
    """An embedding, too, must go to the engine that has its model."""
    made = intake()
    body = b'{"model": "m", "input": "a"}'
    made.sessions = SessionIds(("x-session-id",))
    asked = head(path, x_session_id="s")
    hints = made.plan(asked, body, made.read(asked, body)).hints

    assert (hints.model, hints.session) == ("m", "s")


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "9" * 10, "1_0"])
def test_a_rank_is_a_number(text):
    """The engine would say so too, after the prefill."""
    with pytest.raises(BadRequest, match="X-data-parallel-rank"):
        planned(head(x_data_parallel_rank=text))


@pytest.mark.parametrize("path", [path for path, kind in ENDPOINTS.items() if kind is not EndpointKind.FORM])
@pytest.mark.parametrize("inside", ["vllm_xargs", "sampling_params"])
def test_what_no_client_may_set_reaches_no_engine(path, inside):
    """A chat in a batch generates as any other, and would report its whole cache to each follower of the events."""
    extra = {"kv_cache_report_mode": "full", "mine": 1}
    body = json.dumps({"model": "m", inside: extra if inside == "vllm_xargs" else {"extra_args": extra}}).encode()
    made = intake()
    asked = head(path)
    plan = made.plan(asked, body, made.read(asked, body))
    sent = b"".join(plan.body) if plan.call is None else encode(plan.call.fields)

    assert b"kv_cache_report_mode" not in sent
    assert b'"mine":1' in sent.replace(b" ", b"")


def test_engines_see_only_some_headers():
    """All of one name, in their order: it is for the engine to judge them."""
    asked = head(authorization="k", cookie="c", x_session_id="s")
    asked.headers.insert(0, (b"tracestate", b"a=1"))
    asked.headers.append((b"tracestate", b"b=2"))

    assert planned(RequestHead(asked.path, asked.headers)).headers == (
        (b"tracestate", b"a=1"),
        (b"x-session-id", b"s"),
        (b"tracestate", b"b=2"),
    )


@pytest.mark.parametrize("declared", ["application/json", "Application/JSON ; charset=utf-8"])
def test_json_may_be_declared_in_several_ways(declared):
    assert intake().check(head(content_type=declared)) == "-"


@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", "application/json5", "\xff"])
def test_another_type_is_not_guessed_at(declared):
    """And the answer says what it was."""
    with pytest.raises(UnsupportedMedia, match="must be application/json, not"):
        intake().check(head(content_type=declared))


def test_a_form_says_where_its_parts_end():
    """What declares anything else is refused before its body is read."""
    declared = "Multipart/Form-Data; boundary=x"

    assert intake().check(head(FORM, content_type=declared)) == "-"
    for other in ("application/json", "multipart/mixed", "multipart/form-data"):
        with pytest.raises(UnsupportedMedia, match="multipart/form-data"):
            intake().check(head(FORM, content_type=other))


MEDIUM = (
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.internal/"}}]}]}'
)
KEYS = Keyring(Keys.parse("team-a:key-of-team-a-001\n", "keys"))


@pytest.mark.parametrize(
    ("keyring", "options", "is_taken"),
    [
        (Keyring(), {}, True),
        (KEYS, {}, False),
        (Keyring(), {"tls_client_ca": "ca.pem"}, False),
        (KEYS, {"allowed_media_domains": ("A.internal",)}, True),
        (KEYS, {"allowed_media_domains": ("*",)}, True),
        (Keyring(), {"allowed_media_domains": ("b.example",)}, False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/pooling", "/tokenize"])
def test_where_clients_are_told_apart_engines_fetch_nothing_that_the_operator_has_not_allowed(
    path, keyring, options, is_taken
):
    """Engines are inside the closed network, and the URL is a stranger's."""
    hosts = frozenset(map(str.lower, options.get("allowed_media_domains", ())))
    made = Intake(Settings(**options), Lifetime(), keyring, Sites(Settings()), media_hosts=hosts)

    if is_taken:
        assert made.read(head(path), MEDIUM)
    else:
        with pytest.raises(BadRequest, match=r"a\.internal.*allowed_media_domains"):
            made.read(head(path), MEDIUM)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"chat_template": "{{ 1 }}"}', "chat_template"),
        (b'{"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}', "chat_template_kwargs.chat_template"),
        (b'{"chat_template_kwargs": {"\\u0063hat_template": ""}}', "chat_template_kwargs.chat_template"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/pooling", "/tokenize", "/score"])
def test_a_clients_chat_template_reaches_no_engine(path, body, param):
    """One that loops stops all chats of an engine; vLLM 0.30 and 0.31 take it in /v1/responses."""
    with pytest.raises(BadRequest, match="trust_request_chat_template") as refused:
        intake().read(head(path), body)

    assert refused.value.param == param
    assert intake(trust_request_chat_template=True).read(head(path), body)


@pytest.mark.parametrize(
    "body", [b'{"chat_template": null}', b'{"chat_template_kwargs": {"enable_thinking": false}}', b'{"n": 1}']
)
def test_what_a_template_is_told_is_the_clients_business(body):
    """Whether a model thinks is one of its arguments."""
    assert intake().read(head("/v1/chat/completions"), body)


def test_repeated_headers_are_all_passed_on():
    """It is for the engine to judge them."""
    headers = [(b"tracestate", b"a=1"), (b"host", b"x"), (b"tracestate", b"b=2")]

    assert passed_on(headers) == (headers[0], headers[2])
