"""What is read of a prefill engine's offer, and of the first event of a decode engine's stream."""

from typing import Annotated

import msgspec

from pdrelay_proxy.core.raw_json import NULL


class FirstTokenOffer(msgspec.Struct, frozen=True):
    """What a prefill engine says of its token
    (connector/pdrelay_connector/shell/first_token.py).
    """

    apis: tuple[str, ...]  # for which a client may see it
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]  # tokens of a prompt and its answer together


class RoleDelta(msgspec.Struct):
    """What an event of a chat's stream adds, as far as it tells whether it only says who speaks."""

    role: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    content: msgspec.Raw = NULL


class RoleChoice(msgspec.Struct):
    """The choice of such an event."""

    delta: RoleDelta | None = None


class RoleEvent(msgspec.Struct):
    """Such an event."""

    choices: tuple[RoleChoice, ...] = ()
