"""What a router says that it does not use of its engines' KV."""

import dataclasses

import pytest

from pdrelay_proxy.core.routing.kv_reuse import reused_kv, unused_kv
from pdrelay_proxy.settings import Settings

ALL = dataclasses.replace(Settings(), **reused_kv({}, {}, ()))


def test_the_defaults_use_none_of_it():
    """One line at the start names all of it and what would use it."""
    said = unused_kv(Settings(), ["events are not read (events)"], ())

    assert said is not None
    assert said.count("; ") == 3
    assert said.endswith(": --reuse-kv true uses all that the engines offer")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"return_kv": False}, "return_kv"),
        ({"min_split_new_bytes": 0}, "min_split_new_bytes"),
        ({"prefill_policy": "round_robin", "decode_policy": "session"}, "prefill_policy"),
    ],
)
def test_what_is_left_out_is_named_alone(changes, named):
    """The rest is in use."""
    said = unused_kv(dataclasses.replace(ALL, **changes), (), ())

    assert said is not None
    assert f"({named}" in said
    assert "; " not in said


def test_a_router_that_uses_all_of_it_says_nothing():
    """Nor one whose operator has taken a part out."""
    assert unused_kv(ALL, (), ()) is None
    assert unused_kv(Settings(reuse_kv=True), ["events are not read (events)"], ()) is None


def test_what_features_leave_out_is_named_too():
    """And what ``reuse_kv`` sets of theirs is set only where a policy goes by caches."""
    by_features = {"events": "auto"}

    assert unused_kv(ALL, ["events are not read (events)"], ()) == (
        "events are not read (events): --reuse-kv true uses all that the engines offer"
    )
    assert reused_kv({}, by_features, ())["events"] == "auto"
    assert "events" not in reused_kv({"prefill_policy": "session", "decode_policy": "session"}, by_features, ())
    assert "events" not in reused_kv({"events": "off"}, by_features, ())


def test_policies_of_features_choose_both_engines_by_what_these_have():
    """One that is chosen for a leg is chosen for the other, too."""
    found = reused_kv({"decode_policy": "theirs"}, {"events": "auto"}, ("theirs",))

    assert (found["prefill_policy"], found["events"], found["return_kv"]) == ("theirs", "auto", True)
    assert unused_kv(dataclasses.replace(ALL, prefill_policy="theirs", decode_policy="theirs"), (), ("theirs",)) is None
