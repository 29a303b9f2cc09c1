"""The salt that keeps clients apart in a prefix cache."""

import json

import pytest

from pdrelay_proxy.core.admission.cache_salts import Salts
from pdrelay_proxy.core.admission.keys import Keyring, Keys
from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.errors import BadRequest, Unauthorized

KEYS = Keys.parse("a:sk-1-of-16-chars\na:sk-2-of-16-chars\nb:sk-3-of-16-chars\n", "keys")


def salt(caller, given=None, *, keys=KEYS, secret=None, salts=None):
    body = {"prompt": "x"} | ({} if given is None else {"cache_salt": given})
    fields = parse(json.dumps(body).encode())
    return json.loads(bytes((salts or Salts(Keyring(keys), secret)).salted(fields, caller)["cache_salt"]))


@pytest.mark.parametrize("secret", [None, "of the fleet"])
def test_each_client_has_its_own_in_all_routers_of_a_fleet(secret):
    """Two routers share nothing but their settings."""
    assert salt("a", secret=secret) == salt("a", secret=secret)
    assert len({salt("a", secret=secret), salt("b", secret=secret), salt("c", secret="other")}) == 3


def test_a_clients_own_salt_counts_within_its_own():
    """It may keep its users apart, and cannot name the salt of somebody else."""
    mine = salt("a")
    assert len({mine, salt("a", "u1"), salt("a", "u2"), salt("b", "u1"), salt("b", mine)}) == 5
    assert salt("a", "u1") == salt("a", "u1")


def test_it_is_one_that_vllm_takes():
    """At most 128 characters, and none of @, / and backslash."""
    for one in (salt("a"), salt("a", "@/\\" + "x" * 500)):
        assert one.isalnum()
        assert len(one) <= 128


@pytest.mark.parametrize("given", ["", 3, ["a"], {"a": 1}, True])
def test_what_is_no_salt_is_refused(given):
    """An engine would refuse it; hashed, it would pass."""
    with pytest.raises(BadRequest, match="cache_salt must be a string"):
        salt("a", given)


def test_another_key_is_another_salt_unless_the_fleet_has_a_secret():
    """A key that was replaced because it got known must not open the old one's cache."""
    new = Keys.parse("a:sk-9-of-16-chars\n", "keys")
    assert salt("a", keys=new) != salt("a")
    assert salt("a", keys=new, secret="s") == salt("a", secret="s")


def test_keys_that_are_read_again_count_at_once():
    """The router does so at SIGHUP."""
    keyring = Keyring(KEYS)
    salts = Salts(keyring, None)
    before = salt("a", salts=salts)
    keyring.keys = Keys.parse("a:sk-9-of-16-chars\n", "keys")

    assert salt("a", salts=salts) != before


@pytest.mark.parametrize("given", [None, "mine"])
def test_a_key_that_was_taken_away_meanwhile_is_none(given):
    """Its request was let in with it, and its body came later."""
    keyring = Keyring(KEYS)
    salts = Salts(keyring, None)
    keyring.keys = Keys.parse("b:sk-3-of-16-chars\n", "keys")

    with pytest.raises(Unauthorized, match="not one that this router knows any more"):
        salt("a", given, salts=salts)
