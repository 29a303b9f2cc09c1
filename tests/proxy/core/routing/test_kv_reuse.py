"""What a router says that it does not use of its engines' KV."""

import dataclasses

import pytest

from pdrelay_proxy.core.routing.kv_reuse import reused_kv, unused_kv
from pdrelay_proxy.settings import KvEvents, Settings

ALL = dataclasses.replace(Settings(), **reused_kv({}))


def test_the_defaults_use_none_of_it():
    """One line at the start names all of it and what would use it."""
    said = unused_kv(Settings())

    assert said is not None
    assert said.count("; ") == 3
    assert said.endswith(": --reuse-kv true uses all that the engines offer")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_events": KvEvents.OFF}, "kv_events"),
        ({"return_kv": False}, "return_kv"),
        ({"min_split_new_bytes": 0}, "min_split_new_bytes"),
        ({"prefill_policy": "round_robin", "decode_policy": "session"}, "prefill_policy"),
    ],
)
def test_what_is_left_out_is_named_alone(changes, named):
    """The rest is in use."""
    said = unused_kv(dataclasses.replace(ALL, **changes))

    assert said is not None
    assert f"({named}" in said
    assert "; " not in said


def test_a_router_that_uses_all_of_it_says_nothing():
    """Nor one whose operator has taken a part out."""
    assert unused_kv(ALL) is None
    assert unused_kv(Settings(reuse_kv=True)) is None
