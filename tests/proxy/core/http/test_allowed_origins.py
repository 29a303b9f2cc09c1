"""Which pages may read answers in a browser."""

import pytest

from pdrelay_proxy.core.http.allowed_origins import AllowedOrigins, is_origin

APP = b"https://app.example"


@pytest.mark.parametrize("text", ["*", "https://app.example", "http://localhost:3000", "http://[::1]:8080"])
def test_what_an_origin_is(text):
    """A scheme, a host and a port: what a browser says."""
    assert is_origin(text)


@pytest.mark.parametrize("text", ["app.example", "https://", "https://a/b", "https://*.example", "null", "ftp://a", ""])
def test_what_no_origin_is(text):
    """A page of a file or a sandbox is null: every site can make such pages."""
    assert not is_origin(text)


def test_an_allowed_origin_is_repeated_and_others_are_not():
    """A cache keeps the answers apart; and none comes with credentials."""
    origins = AllowedOrigins(["https://app.example", "http://localhost:3000"])

    allowed = dict(origins.headers(APP))
    assert allowed.keys() == {b"access-control-allow-origin", b"access-control-expose-headers", b"vary"}
    assert (allowed[b"access-control-allow-origin"], allowed[b"vary"]) == (APP, b"Origin")
    for other in (None, b"null", b"https://evil.example", b"https://app.example.evil.example", b"http://app.example"):
        assert origins.headers(other) == ((b"vary", b"Origin"),)


def test_any_origin_is_the_sign_for_all():
    """Never the origin itself, which would allow credentials as well."""
    origins = AllowedOrigins(["*"])

    assert dict(origins.headers(APP))[b"access-control-allow-origin"] == b"*"
    assert origins.headers(None) == ()


def test_a_browser_gets_the_headers_that_it_asks_for():
    """Libraries send headers of their own; what is no list of names is not repeated."""
    origins = AllowedOrigins(["https://app.example"])
    names = b"authorization, content-type, x-stainless-os"
    asked = (b"origin", APP), (b"access-control-request-headers", names)

    found = dict(origins.permission(asked, b"POST"))
    assert found[b"access-control-allow-headers"] == names
    assert found[b"access-control-allow-methods"] == b"POST"
    assert found[b"vary"].startswith(b"Origin")
    assert b"access-control-allow-credentials" not in found
    assert origins.permission(((b"origin", b"https://evil.example"), asked[1]), b"POST") is None
    assert origins.permission((asked[1],), b"POST") is None
    odd = (asked[0], (b"access-control-request-headers", b"a: b"))
    assert b"access-control-allow-headers" not in dict(origins.permission(odd, b"POST"))
