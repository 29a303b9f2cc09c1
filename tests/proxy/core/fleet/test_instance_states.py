"""The engines as those see them who only look."""

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.instance_states import InstanceStates
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import Role


def test_every_engine_is_there_with_a_state_and_the_reason_for_it():
    """Also those that get no requests."""
    registry = Registry()
    registry.add(Role.DECODE, Address("http", "h", 1))
    drained = registry.add(Role.PREFILL, Address("http", "h", 2))
    registry.member(drained.id).life.drain(now=1.0)
    roll = InstanceStates(registry)

    found = [(standing.instance.id, standing.state, standing.why) for standing in roll.standings()]
    assert found == [("decode-0", "starting", "added"), ("prefill-0", "draining", "is to be drained")]
    assert {state for _, state, _ in found} <= set(roll.states())
