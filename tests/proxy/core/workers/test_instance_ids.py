"""Ids and orders, as all workers come to them."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import EngineRole, InstanceId, Role
from pdrelay_proxy.core.workers.instance_ids import InstanceIds, Verb, key_of, turned_text

D0, D1, P0 = (
    key_of(role, host, None, "static", "")
    for role, host in ((Role.DECODE, "a:1"), (Role.DECODE, "b:1"), (Role.PREFILL, "c:1"))
)
NAMES = ["decode-0", "decode-1", "decode-2", "prefill-0"]
LINES = st.lists(
    st.one_of(
        st.tuples(st.just(Verb.NAME), st.sampled_from([D0, D1, P0])),
        st.tuples(
            st.sampled_from([verb for verb in Verb if verb not in (Verb.NAME, Verb.TURNED)]), st.sampled_from(NAMES)
        ),
        st.tuples(st.just(Verb.TURNED), st.builds(turned_text, st.sampled_from(NAMES), st.sampled_from(EngineRole))),
    )
)


def roster(*lines):
    found = InstanceIds()
    for line in lines:
        found.apply(line)
    return found


def test_engines_are_numbered_by_role_in_the_order_they_came():
    """As a registry of one process does it."""
    found = roster((Verb.NAME, D0), (Verb.NAME, P0), (Verb.NAME, D1))

    assert [found.number(key) for key in (D0, P0, D1)] == [0, 0, 1]


def test_an_engine_that_is_closed_and_comes_again_has_another_id():
    """Its id is never used again, and what was ordered for the one before says nothing of it."""
    closed = (Verb.NAME, D0), (Verb.DRAIN, "decode-0"), (Verb.CLOSE, "decode-0")

    assert roster(*closed).number(D0) is None
    found = roster(*closed, (Verb.NAME, D0), (Verb.REMOVE, "decode-0"))
    assert found.number(D0) == 1
    assert found.order(InstanceId("decode-1")) is None


def test_the_latest_order_holds_until_it_is_taken_back():
    """A worker that starts later goes by it."""
    name = InstanceId("decode-0")
    drained = (Verb.NAME, D0), (Verb.DRAIN, name)

    assert roster(*drained).order(name) is Verb.DRAIN
    assert roster(*drained, (Verb.MOVE, name)).order(name) is Verb.MOVE
    assert roster(*drained, (Verb.UNDRAIN, name)).order(name) is None
    assert roster(*drained, (Verb.REMOVE, name)).is_removed(D0)
    assert not roster(*drained, (Verb.REMOVE, name), (Verb.NAME, D0)).is_removed(D0)


def test_what_an_engine_has_turned_to_holds_beside_what_was_ordered():
    """Until it is closed: what comes to its address then is another engine."""
    name = InstanceId("decode-0")
    turned = (Verb.NAME, D0), (Verb.DRAIN, name), (Verb.TURNED, turned_text(name, EngineRole.PREFILL))

    assert roster((Verb.NAME, D0)).role(name) is None
    assert (roster(*turned).role(name), roster(*turned).order(name)) == (EngineRole.PREFILL, Verb.DRAIN)
    assert roster(*turned, (Verb.UNDRAIN, name)).role(name) is EngineRole.PREFILL
    assert roster(*turned, (Verb.CLOSE, name), (Verb.NAME, D0)).role(InstanceId("decode-1")) is None


@given(LINES)
def test_two_engines_never_have_one_id(lines):
    """Whatever comes in whatever order; and what is said of an engine that is not there is dropped."""
    found = InstanceIds()
    given_ids = set()
    for line in lines:
        before = found.number(line[1]) if line[0] is Verb.NAME else None
        found.apply(line)
        if line[0] is Verb.NAME:
            name = f"{line[1].partition(' ')[0]}-{found.number(line[1])}"
            assert name not in given_ids
            assert before is None or found.number(line[1]) > before
            given_ids.add(name)
