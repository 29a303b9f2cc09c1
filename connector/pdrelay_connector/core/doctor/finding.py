"""One thing that is wrong, and the setting that mends it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """``name`` never changes its meaning: scripts may compare it.

    ``what`` has the value, ``mend`` the setting.
    """

    name: str
    what: str
    mend: str

    @property
    def sentence(self) -> str:
        """What is shown."""
        return f"{self.what}; {self.mend}"


class _Refused(NamedTuple):
    """A kind of connection failure, known by words of session/handshake.py or io/connect.py."""

    words: str
    name: str
    mend: str


SECRET_MEND: Final = "give both the same secret (PDRELAY_CONNECTOR_SECRET_FILE)"
REFUSALS: Final[Sequence[_Refused]] = (
    _Refused("(PDRELAY_CONNECTOR_SECRET) is missing or differs", "secret", SECRET_MEND),
    _Refused("you have a shared secret", "secret", SECRET_MEND),
    _Refused("it does not prove the shared secret", "secret", SECRET_MEND),
    _Refused(
        "speaks protocol",
        "protocol",
        "install one version of pdrelay at both: they speak different versions of the protocol",
    ),
    _Refused(
        "does not answer here (any more)",
        "other-process",
        "dial a waiting pdrelay doctor (port 5690), or name the engine as ENGINE_ID@HOST:PORT with "
        "its present id (label engine_id of its metric vllm:pdrelay_connector_info)",
    ),
    _Refused(
        "this engine does not listen there",
        "address",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST there to the address that is dialled, or remove the relay "
        "in between",
    ),
    _Refused(
        "the certificate of",
        "certificate",
        "set tls_ca and tls_server_name here so that they fit its certificate",
    ),
    _Refused(
        "does not accept our TLS 1.3",
        "tls",
        "set tls_cert and tls_ca here as they are there, or dial the right port",
    ),
    _Refused(
        "NIXL listens on loopback only",
        "loopback",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST here to the address that other machines reach",
    ),
    _Refused(
        "Connection refused",
        "not-listening",
        "start it there, or correct the host and port: its machine answers, and nothing listens at "
        "that port",
    ),
    _Refused(
        "no handshake with",
        "no-handshake",
        "dial the side channel's port (VLLM_NIXL_SIDE_CHANNEL_PORT, 5600), not HTTP's, and look at "
        "that process's log",
    ),
    _Refused(
        "cannot connect to",
        "unreachable",
        "open that TCP port in firewalls, security groups and NetworkPolicies on the way, or "
        "correct the address",
    ),
)


def refusal(reason: str) -> Finding:
    """Return what a failure to connect means."""
    for known_refusal in REFUSALS:
        if known_refusal.words in reason:
            return Finding(known_refusal.name, reason, known_refusal.mend)
    return Finding("refused", reason, "look at the log of that process")
