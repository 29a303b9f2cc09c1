"""What one router writes into a store, every other reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.discovery.store_entries import entry_name, entry_of, read_entry
from pdrelay_proxy.core.fleet.target import Key, Target, Wanted
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.errors import AddressError


@given(
    st.sampled_from(Role),
    st.sampled_from(["h:80", "https://h_x-y.example:1", "[fd00::1]:8000", "10.0.0.1:65535", "x" * 60 + ".y:1"]),
    st.sampled_from([(None,), (0,), (0, 1, 2)]),
    st.sampled_from([None, *EngineMode]),
    st.sampled_from([None, "v1", "5f6d-a.b_c"]),
    st.booleans(),
    st.booleans(),
)
def test_an_entry_says_what_was_written(role, address, ranks, mode, revision, leaves, moves):
    """Whatever an engine is, another router reads the same."""
    wanted = Wanted(role, Target(Address.parse(address), ranks, mode, revision), leaves=leaves, moves=moves)

    assert read_entry(entry_of(wanted)) == wanted


def test_names_of_entries_are_taken_by_every_store_and_tell_engines_apart():
    """A ConfigMap takes letters, digits and -_. only, and 253 of them."""
    long = ".".join(["x" * 60] * 4)
    names = [entry_name(Key(role, at)) for role in Role for at in ("a-b:1", "a_b:1", "a:1", "[fd::1]:1", f"{long}:1")]

    assert len(set(names)) == len(names)
    assert all(len(name) < 253 and not name.strip("abcdefghijklmnopqrstuvwxyz0123456789._-") for name in names)


@pytest.mark.parametrize("text", ["", "[]", '{"role":"both","target":"a:1"}', '{"role":"decode","target":"a"}', "{}"])
def test_what_is_no_entry_is_refused(text):
    """Somebody edited the ConfigMap by hand."""
    with pytest.raises(AddressError):
        read_entry(text)
