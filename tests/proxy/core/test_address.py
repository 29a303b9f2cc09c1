"""Where an engine listens, as operators write it."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.errors import AddressError, BadPort


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("localhost:1", "http://localhost:1"),
        ("http://10.0.0.1:8100", "http://10.0.0.1:8100"),
        ("http://10.0.0.1:8100/", "http://10.0.0.1:8100"),
        ("HTTPS://Engine.Example:443", "https://engine.example:443"),
        ("engine-0.pool_a.svc.cluster.local:65535", "http://engine-0.pool_a.svc.cluster.local:65535"),
        ("engine.example.:80", "http://engine.example.:80"),
        ("[::1]:8100", "http://[::1]:8100"),
        ("https://[2001:DB8:0::1]:8100", "https://[2001:db8::1]:8100"),
    ],
)
def test_every_usual_spelling_is_understood(text, url):
    """Names, IPv4 and IPv6 are what clusters are made of."""
    assert url == Address.parse(text).url


def test_the_authority_is_what_status_shows():
    """/status lists host:port, with the brackets that make IPv6 unambiguous."""
    assert Address.parse("https://[0:0::1]:8100").authority == "[::1]:8100"
    assert Address.parse("A:1").authority == "a:1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "engine",
        ":8100",
        "engine:",
        "engine:http",
        "engine:-1",
        "engine:٣",
        "engine:99999999999",
        "http://engine",
        "ftp://engine:80",
        "http://engine:80/v1",
        "user@engine:80",
        "two words:80",
        "-engine:80",
        "engine-:80",
        "engine..example:80",
        "a" * 64 + ":80",
        ".".join(["a" * 60] * 5) + ":80",
        "1.2.3:80",
        "1.2.3.256:80",
        "::1:8100",
        "[::1]",
        "[::1:8100",
        "[engine]:80",
        "[::1%eth0:80",
        "a:1\n",
    ],
)
def test_anything_else_is_refused_in_one_sentence(text):
    """A typo found at start-up is cheaper than one found by the first request."""
    with pytest.raises(AddressError, match="is not the address of an engine: write host:port"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["engine:0", "engine:65536", "[::1]:70000"])
def test_a_number_that_is_no_port_is_told_apart(text):
    """/instances/add has an answer of its own for it."""
    with pytest.raises(BadPort, match="between 1 and 65535"):
        Address.parse(text)


@pytest.mark.parametrize(
    "host", ["0x7f000001", "0X7F.1", "127.1", "127.0.0.0x1", "2130706433", "0177.0.0.1", "1.2.3.4.0x5"]
)
def test_numbers_that_the_system_takes_for_an_address_are_refused(host):
    """getaddrinfo reads them as inet_aton does: 0x7f000001 is 127.0.0.1, and looks like a name."""
    with pytest.raises(AddressError, match="is not the address of an engine"):
        Address.parse(f"{host}:80")


def test_an_ipv4_address_in_ipv6_is_written_as_what_it_is():
    """Else an engine could be added twice, and a list of networks would be asked about another one."""
    assert (
        Address.parse("[::ffff:127.0.0.1]:80") == Address.parse("[::ffff:7f00:1]:80") == Address.parse("127.0.0.1:80")
    )
