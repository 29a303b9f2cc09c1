"""How a replay chooses engines by the model of vllm-router."""

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_tools.planning.replay.routers import VllmRouter


def engine(name):
    return Instance(InstanceId(name), Role.DECODE, Address("http", name, 8000))


def test_a_text_goes_to_another_engine_when_its_own_has_left():
    """With `--roles auto` an engine takes another role in the middle of a conversation."""
    loads = {"d0": 0.0, "d1": 1.0, "d2": 2.0}
    router = VllmRouter(lambda instance: loads[instance.id])
    hints = RoutingHints(prompt=b"x" * 4096)
    engines = [engine(name) for name in loads]

    assert router.choose(engines, hints).id == "d0"
    assert router.choose(engines[1:], hints).id == "d1"
    loads["d1"] = 3.0
    assert router.choose(engines, hints).id == "d1"
