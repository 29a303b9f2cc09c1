"""What a request is judged by before it is admitted."""

import pytest

from xpyd_proxy.core.admission.keys import Keyring
from xpyd_proxy.core.admission.lifetime import Lifetime
from xpyd_proxy.core.http.origins import Sites
from xpyd_proxy.errors import BadRequest, UnsupportedMedia
from xpyd_proxy.requests.intake import Intake, RequestHead
from xpyd_proxy.settings import Settings

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
    assert planned(head(path, x_data_parallel_rank=text)).ask.rank == rank


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "9" * 10, "1_0"])
def test_a_rank_is_a_number(text):
    """The engine would say so too, after the prefill."""
    with pytest.raises(BadRequest, match="X-data-parallel-rank"):
        planned(head(x_data_parallel_rank=text))


@pytest.mark.parametrize("forwards", [True, False])
def test_engines_see_only_some_headers(forwards):
    """All of one name, in their order: it is for the engine to judge them."""
    asked = head(authorization="k", cookie="c", x_session_id="s")
    asked.headers.insert(0, (b"tracestate", b"a=1"))
    asked.headers.append((b"tracestate", b"b=2"))

    assert planned(RequestHead(asked.path, asked.headers), forward_client_key=forwards).headers == (
        (b"tracestate", b"a=1"),
        *[(b"authorization", b"k")] * forwards,
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
