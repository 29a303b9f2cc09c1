"""How long after a prefill engine's answer a decode leg may be sent.

No engine renews the lease on the blocks until a decode engine has the request.
"""

from typing import Final

import msgspec

from pdrelay_proxy.core.raw_json import maybe
from pdrelay_proxy.core.schemas import LeaseOffer

_LEASE_S: Final = 30.0  # of an engine that does not name it: both connectors' default
_SHARE: Final = 2 / 3  # of the lease; the rest is for connecting and for the decode engine's step


def handoff_timeout(params: msgspec.Raw) -> float:
    """Return the seconds that fit the lease in an answer's ``params``."""
    offer = maybe(params, LeaseOffer)
    return _SHARE * (
        _LEASE_S if offer is None or offer.pdrelay_lease is None else offer.pdrelay_lease
    )
