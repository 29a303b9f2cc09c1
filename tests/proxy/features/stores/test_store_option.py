"""How operators name the store."""

from argparse import ArgumentTypeError

import pytest

from pdrelay_proxy.features.stores.store_url import split_prefix
from pdrelay_proxy.known_settings import OPTIONS
from pdrelay_proxy.setting_values import read


def store(text):
    return read(OPTIONS["store"].kind, text)


@pytest.mark.parametrize(
    "text",
    [
        "memory",
        "file:/var/lib/pdrelay/set.json",
        "kubernetes:pdrelay",
        "kubernetes:llm/pdrelay",
        "redis://h:6379/0",
        "rediss://user@h:1",
        "unix:/s",
        "redis://h:1/0?prefix=ns/rel",
    ],
)
def test_a_store_is_named_in_one_word(text):
    """With everything it needs, but never a password."""
    assert store(text) == text


@pytest.mark.parametrize("text", ["", "etcd://h", "file:", "kubernetes", "Memory"])
def test_any_other_is_refused_with_what_would_be_right(text):
    """Before anything is served."""
    with pytest.raises(ArgumentTypeError, match=r"write memory, file:PATH, kubernetes:CONFIGMAP or redis://"):
        store(text)


@pytest.mark.parametrize("prefix", ["", "{x}", "a b", "a&prefix=b", "x" * 201])
def test_a_prefix_that_cannot_be_one_is_refused(prefix):
    """Braces would choose another slot of a Redis Cluster."""
    with pytest.raises(ArgumentTypeError, match="a store's prefix is written once"):
        store(f"redis://h:6379/0?prefix={prefix}")


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("redis://h:6379/0?prefix=ns/rel", "redis://h:6379/0"),
        ("redis://h:6379?db=3&prefix=ns/rel", "redis://h:6379?db=3"),
        ("unix:/run/redis.sock?prefix=ns/rel&db=1", "unix:/run/redis.sock?db=1"),
    ],
)
def test_the_prefix_is_no_part_of_what_the_client_gets(url, bare):
    """The library refuses what it does not know."""
    assert split_prefix(url) == (bare, "ns/rel")
    assert split_prefix(bare) == (bare, "")


@pytest.mark.parametrize("text", ["redis://:hunter2@h:6379/0", "redis://h:6379/0?db=1&password=hunter2"])
def test_a_password_in_an_argument_is_refused_and_not_repeated(text):
    """Everybody on the machine can see arguments. The library takes it in the query, too."""
    with pytest.raises(ArgumentTypeError, match="PDRELAY_REDIS_PASSWORD") as info:
        store(text)
    assert "hunter2" not in str(info.value)
