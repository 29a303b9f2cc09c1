"""How long after a prefill engine's answer its blocks may still be there."""

import msgspec
import pytest

from pdrelay_proxy.core.protocol.handoff import handoff_timeout


@pytest.mark.parametrize(
    ("params", "chosen", "expected"),
    [
        (b'{"pdrelay_lease":30.0}', None, 20.0),
        (b'{"pdrelay_lease":3}', None, 2.0),
        (b'{"pdrelay_lease":300,"remote_host":"h"}', None, 200.0),
        (b'{"remote_host":"h"}', None, 20.0),
        (b'{"pdrelay_lease":null}', None, 20.0),
        (b'{"pdrelay_lease":-3}', None, 20.0),
        (b'{"pdrelay_lease":"3"}', None, 20.0),
        (b'{"pdrelay_lease":3}', 25.0, 25.0),
    ],
)
def test_it_follows_the_lease_that_the_engine_names_unless_an_operator_chooses(params, chosen, expected):
    """Of an engine that names none it is that of both connectors' default."""
    assert handoff_timeout(msgspec.Raw(params), chosen) == pytest.approx(expected)
