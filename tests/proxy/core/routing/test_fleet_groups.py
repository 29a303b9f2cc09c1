"""How the engines of a whole fleet fit each other, as metrics and the status page count it."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.routing.fleet_groups import grouping_in_steps, unpaired_in_steps
from pdrelay_proxy.core.steps import finish


def registry_of(engines):
    registry = Registry()
    for number, (role, revision, refused) in enumerate(engines):
        instance = registry.add(role, Address("http", f"h{number}", 80))
        incompatible = frozenset(f"e{one}" for one in refused) if role is Role.DECODE else None
        registry.learn(
            instance.id,
            EngineCapabilities(
                revision=revision, engine_id=f"e{number}", incompatible=incompatible, connector="pdrelay"
            ),
        )
    return registry


@given(
    st.lists(
        st.tuples(st.sampled_from(Role), st.sampled_from(["r1", "r2", None]), st.sets(st.integers(0, 5), max_size=3)),
        max_size=8,
    )
)
def test_engines_without_a_partner_are_those_that_requests_find_none_for(engines):
    """Counted in steps for metrics, and by the groups that requests are routed by: the numbers are the same."""
    registry = registry_of(engines)
    groups = finish(grouping_in_steps(registry))
    roles = {role for role, _, _ in engines}
    routed = {Role.PREFILL: len(groups.unpaired_prefill), Role.DECODE: len(groups.unpaired_decode)}

    assert finish(unpaired_in_steps(registry)) == (routed if roles == {*Role} else dict.fromkeys(Role, 0))


def test_thousands_of_engines_are_counted_in_steps():
    """Each is a part of the fleet, and none compares engines that are alike."""
    engines = [(role, "r1", ()) for role in Role for _ in range(2_000)]
    steps = sum(1 for _ in unpaired_in_steps(registry_of(engines)))

    assert 16 <= steps <= 20
