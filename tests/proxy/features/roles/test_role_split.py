"""The arithmetic of a split: monotone, symmetric, and never there and back."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.roles.role_split import MARGIN, OTHER, Busy, Split, is_short, lacking, needed_split

P, D = Role.PREFILL, Role.DECODE
counts = st.integers(1, 40)
work = st.floats(0, 60)


def busy(prefill, decode):
    return Busy(prefill, decode, 0.7)


@given(prefill=counts, decode=counts, p=work, d=work, more=st.floats(0, 60))
def test_more_work_of_a_role_never_takes_an_engine_from_it(prefill, decode, p, d, more):
    """Monotone in the load: an operator who sees prompts grow never sees a prefill engine leave for that."""
    split = Split(prefill, decode)
    before, after = lacking(busy(p, d), split), lacking(busy(p + more, d), split)

    assert before is not P or after is P
    assert after is not D or before is D


@given(prefill=counts, decode=counts, p=work, d=work)
def test_roles_are_alike(prefill, decode, p, d):
    """Nothing in it prefers one."""
    one, mirrored = lacking(busy(p, d), Split(prefill, decode)), lacking(busy(d, p), Split(decode, prefill))

    assert mirrored is (None if one is None else OTHER[one])


@given(prefill=counts, decode=counts, p=work, d=work, noise=st.tuples(*[st.floats(1 / MARGIN, 1.0)] * 4))
def test_noise_within_the_margin_never_turns_an_engine_there_and_back(prefill, decode, p, d, noise):
    """Whatever was measured before and after: the numbers of a role may be too small by the margin."""
    split = Split(prefill, decode)
    first = lacking(busy(p * noise[0], d * noise[1]), split)
    if first is not None and split.for_role(OTHER[first]) > 1:
        again = lacking(busy(p * noise[2], d * noise[3]), split.after_change(first))

        assert again is not OTHER[first]


@given(prefill=counts, decode=counts, p=work, d=work)
def test_a_turn_makes_the_worse_role_better(prefill, decode, p, d):
    """The highest pressure falls, or the turn is not made."""
    split = Split(prefill, decode)
    traffic = busy(p, d)
    role = lacking(traffic, split)
    if role is not None:
        after = split.after_change(role)

        assert is_short(traffic, split)
        assert max(traffic.pressure(each, after) for each in Role) < max(traffic.pressure(each, split) for each in Role)


@given(p=work, d=work, least=st.tuples(counts, counts))
def test_what_is_wanted_is_enough_and_no_more(p, d, least):
    """One engine less would be busier than the target, or fewer than the least."""
    found = needed_split(busy(p, d), Split(*least))

    for role in Role:
        amount = busy(p, d).for_role(role)
        bound = Split(*least).for_role(role)
        assert found.for_role(role) >= bound
        assert amount <= 0.7 * found.for_role(role) + 1e-6
        assert found.for_role(role) == bound or amount > 0.7 * (found.for_role(role) - 1) - 1e-6
