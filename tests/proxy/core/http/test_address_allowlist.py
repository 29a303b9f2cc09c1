"""Where engines may be added."""

import pytest

from pdrelay_proxy.core.http.address_allowlist import AllowList

STANDARD = AllowList.parse(())


@pytest.mark.parametrize(
    "place", ["127.0.0.1", "127.9.9.9", "::1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.9", "fd12::1"]
)
def test_what_is_private_is_admitted_by_itself(place):
    """An operator who adds a pod should not have to name its network first."""
    assert STANDARD.admits("d0.example", place)


METADATA = ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
NOWHERE = ("169.254.0.1", "fe80::1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255")
PUBLIC = ("8.8.8.8", "2001:db8::1", "172.32.0.1", "64:ff9b::a00:1")
MAPPED = ("::ffff:169.254.169.254", "::ffff:8.8.8.8")


@pytest.mark.parametrize("place", [*METADATA, *NOWHERE, *PUBLIC, *MAPPED])
def test_metadata_services_and_the_internet_are_not(place):
    """The first give credentials to who asks, and the second would get prompts."""
    assert not STANDARD.admits("d0.example", place)


def test_an_ipv4_address_inside_an_ipv6_one_is_that_address():
    """RFC 4291, 2.5.5.2: the socket that opens is one of IPv4."""
    assert STANDARD.admits("x", "::ffff:10.0.0.1")


def test_networks_that_are_listed_count_alone():
    """The standard ones are for who has not said anything."""
    allowed = AllowList.parse(("10.8.0.0/16", "2001:db8::/32", "192.0.2.7"))

    assert [allowed.admits("x", place) for place in ("10.8.1.1", "2001:db8::5", "192.0.2.7")] == [True] * 3
    assert not any(allowed.admits("x", place) for place in ("10.9.1.1", "127.0.0.1", "192.0.2.8", "::1"))


def test_a_name_is_trusted_with_where_it_leads_but_not_to_metadata():
    """Who may change its DNS entry must not get credentials by it."""
    allowed = AllowList.parse(("d0.example", "*.pods.example"))

    for name in ("d0.example", "D0.Example.", "a.pods.example", "a.b.pods.example"):
        assert allowed.admits(name, "203.0.113.5")
        assert not allowed.admits(name, "169.254.169.254")
    for name in ("d1.example", "pods.example", "evilpods.example", "d0.example.evil", "203.0.113.5"):
        assert not allowed.admits(name, "203.0.113.5")


def test_what_is_never_an_engine_can_be_named_itself():
    """A test may have a reason; 0.0.0.0/0 is none."""
    assert not AllowList.parse(("0.0.0.0/0",)).admits("x", "169.254.7.7")
    assert AllowList.parse(("0.0.0.0/0",)).admits("x", "8.8.8.8")
    assert AllowList.parse(("169.254.7.0/24",)).admits("x", "169.254.7.7")


@pytest.mark.parametrize(
    "entry", ["", "10.0.0.0/33", "10.0.0.1/8", "*", "*.*.a", "a b", "0x7f000001", "127.1", "a/b", "-a"]
)
def test_what_is_neither_a_network_nor_a_name_is_said_so(entry):
    """10.0.0.1/8 has bits of a host: it may mean either."""
    with pytest.raises(ValueError, match="is not a place of engines: write a network such as"):
        AllowList.parse((entry,))
