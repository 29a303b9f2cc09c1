"""Names and web sites that a router takes requests for."""

import pytest

from pdrelay_proxy.core.http.origins import Sites, check_open, is_loopback
from pdrelay_proxy.errors import ConfigError, CrossSite, Misdirected
from pdrelay_proxy.settings import Settings

HERE = Settings()
WIDE = Settings(host="0.0.0.0", allow_unauthenticated=True)
JSON = (b"content-type", b"application/json")


def admits(settings, host, *, has_keys=False):
    return Sites(settings, "gpu1.corp.example").admits(host.encode(), has_keys=has_keys)


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LocalHost."])
def test_this_machine_is_called_so(host):
    """With any port: a forwarded one is another one."""
    assert admits(HERE, host)
    assert admits(HERE, host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "x", "localhost:80:80", "[::1", "a b"],
)
def test_a_name_that_may_be_anothers_is_refused(host):
    """Its page would read the answers once the name means this address."""
    assert not admits(HERE, host)
    assert admits(HERE, host, has_keys=True)
    assert admits(Settings(tls_cert="c"), host)
    assert admits(Settings(allowed_hosts=("*",)), host)


@pytest.mark.parametrize(
    "host",
    ["10.0.0.7:8000", "[fd00::1]:8000", "router", "router.ns.svc:80", "r.ns.svc.cluster.local", "gpu1.corp.example"],
)
def test_a_router_for_others_has_addresses_and_inner_names(host):
    """Which no web site can have."""
    assert admits(WIDE, host)
    assert not admits(WIDE, "evil.example")
    assert not admits(WIDE, "router.dev")  # a namespace may be called like a top-level domain


def test_names_may_be_added():
    """And where keys are wanted, a list is a limit."""
    listed = Settings(host="0.0.0.0", allowed_hosts=("LLM.example",), api_keys_file="k")
    assert admits(listed, "llm.example:443", has_keys=True)
    assert admits(listed, "10.0.0.7", has_keys=True)  # a probe
    assert not admits(listed, "evil.example", has_keys=True)


def check(method="POST", *headers, has_keys=False):
    Sites(HERE).check(method, (*headers, JSON), has_keys=has_keys)


@pytest.mark.parametrize(
    "headers",
    [
        (b"origin", b"https://evil.example"),
        (b"origin", b"null"),
        (b"origin", b"http://localhost:3000"),
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-site", b"same-site"),
        (b"sec-fetch-site", b"x"),
    ],
)
def test_other_sites_may_not_post(headers):
    """Where there is no key that only its owner has."""
    host = (b"host", b"localhost:8000")
    with pytest.raises(CrossSite, match="another web site"):
        check("POST", host, headers)

    check("GET", host, headers)  # they cannot read the answer
    check("POST", host, headers, has_keys=True)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"origin", b"http://localhost:8000"),),
        ((b"origin", b"https://public.example"), (b"sec-fetch-site", b"same-origin")),  # behind a proxy
        ((b"sec-fetch-site", b"none"),),
    ],
)
def test_clients_and_pages_of_its_own_may(headers):
    """They say so, or nothing."""
    check("POST", (b"host", b"localhost:8000"), *headers)


def test_each_host_counts():
    """Nobody knows which one another server would take."""
    with pytest.raises(Misdirected, match=r"'evil\.example'"):
        Sites(HERE).check("GET", ((b"host", b"localhost"), (b"host", b"evil.example")), has_keys=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_who_only_serves_this_machine_may_be_open(host):
    """As a first try is."""
    assert is_loopback(host)
    check_open(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu1", "localhost.evil.example"])
def test_who_serves_others_must_know_them_or_say_so(host):
    """A forgotten file of keys would open the engines to a network."""
    with pytest.raises(ConfigError, match=f"^host is {host}, so others .* api_keys_file .* allow_unauthenticated"):
        check_open(Settings(host=host))

    for more in ({"api_keys_file": "k"}, {"tls_client_ca": "c"}, {"allow_unauthenticated": True}):
        check_open(Settings(host=host, **more))


def test_who_shows_engines_to_others_must_know_them_or_say_so():
    """The admin port has addresses of engines and metrics, whatever host the main one listens at."""
    with pytest.raises(ConfigError, match=r"^admin_host is 0\.0\.0\.0, so others .* api_keys_file .* allow_unauth"):
        check_open(Settings(host="127.0.0.1", admin_port=8081, admin_host="0.0.0.0"))

    for more in ({"api_keys_file": "k"}, {"tls_client_ca": "c"}, {"allow_unauthenticated": True}):
        check_open(Settings(host="127.0.0.1", admin_port=8081, admin_host="0.0.0.0", **more))
    for admin_host in (None, "::1"):
        check_open(Settings(host="127.0.0.1", admin_port=8081, admin_host=admin_host))


def test_pages_of_other_origins_need_keys():
    """Without one any page of the world could use the engines, if its origin were allowed by mistake."""
    with pytest.raises(ConfigError, match="allowed_origins needs api_keys_file"):
        check_open(Settings(allowed_origins=("*",), allow_unauthenticated=True))
    check_open(Settings(allowed_origins=("*",), api_keys_file="keys"))
