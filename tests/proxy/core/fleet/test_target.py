"""What operators write for an engine."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.errors import AddressError, BadPort

H = Address("http", "h", 80)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("h:80", Target(H)),
        ("http://h:80/", Target(H)),
        ("h:80#dp=3", Target(H, (0, 1, 2))),
        ("h:80#mode=push", Target(H, mode=EngineMode.PUSH)),
        ("h:80#dp=1&mode=pull", Target(H, (0,), EngineMode.PULL)),
        ("h:80#revision=v1&slice=rack-1", Target(H, revision="v1", slice="rack-1")),
        ("h:80#slice=zone.a", Target(H, slice="zone.a")),
        ("h:80#dp=1&mode=pull&revision=v1&slice=a", Target(H, (0,), EngineMode.PULL, "v1", "a")),
    ],
)
def test_a_target_is_an_address_and_what_it_is_beyond_that(text, target):
    """Each rank is an engine of its own."""
    assert Target.parse(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "h:80#",
        "h:80#dp=0",
        "h:80#dp=1000",
        "h:80#dp=x",
        "h:80#mode=both",
        "h:80#&mode=pull",
        "h#dp=2",
        "h:80#dp=2&",
        "h:80#slice=",
        "h:80#slice=a b",
        "h:80#slice=a&revision=b",
    ],
)
def test_anything_else_is_refused(text):
    """In one sentence that says what would be right."""
    with pytest.raises(AddressError, match=r"write|host:port"):
        Target.parse(text)


def test_a_bad_port_stays_a_bad_port():
    """The demo has a message of its own for it."""
    with pytest.raises(BadPort):
        Target.parse("h:70000#dp=2")
