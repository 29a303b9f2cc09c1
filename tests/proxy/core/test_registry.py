"""Who exists."""

import pytest

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.errors import AlreadyKnown, NoInstance

A, B = Address("http", "a", 1), Address("http", "b", 1)


def test_ids_are_stable_and_say_nothing_about_addresses():
    """Clients see them in headers and errors."""
    registry = Registry()
    added = [registry.add(Role.PREFILL, A), registry.add(Role.DECODE, A), registry.add(Role.DECODE, B)]

    assert [instance.id for instance in added] == ["prefill-0", "decode-0", "decode-1"]
    assert tuple(added[1:]) == tuple(registry.known(Role.DECODE))


def test_an_engine_is_added_once_to_a_role():
    """Twice the same would get twice the load; another scheme is still the same port."""
    registry = Registry()
    registry.add(Role.DECODE, A)
    with pytest.raises(AlreadyKnown, match="a:1 is already known as decode-0"):
        registry.add(Role.DECODE, Address("https", "a", 1))


@pytest.mark.parametrize("role", Role)
def test_no_engine_is_an_error(role):
    """An empty list would surprise every policy."""
    with pytest.raises(NoInstance, match=f"no {role} instance"):
        Registry().usable(role)


def test_a_list_that_was_handed_out_does_not_change():
    """A request chooses from what was there when it came."""
    registry = Registry()
    registry.add(Role.DECODE, A)
    before = registry.usable(Role.DECODE)
    registry.add(Role.DECODE, B)

    assert len(before) == 1
