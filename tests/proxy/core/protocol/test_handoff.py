"""How long after a prefill engine's answer its blocks may still be there."""

import msgspec
import pytest

from pdrelay_proxy.core.protocol.handoff import handoff_timeout


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (b'{"pdrelay_lease":30.0}', 20.0),
        (b'{"pdrelay_lease":3}', 2.0),
        (b'{"pdrelay_lease":300,"remote_host":"h"}', 200.0),
        (b'{"remote_host":"h"}', 20.0),
        (b'{"pdrelay_lease":null}', 20.0),
        (b'{"pdrelay_lease":-3}', 20.0),
        (b'{"pdrelay_lease":"3"}', 20.0),
    ],
)
def test_it_follows_the_lease_that_the_engine_names(params, expected):
    """Of an engine that names none it is that of both connectors' default."""
    assert handoff_timeout(msgspec.Raw(params)) == pytest.approx(expected)
