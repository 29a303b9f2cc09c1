"""Examines running engines: connects to their side channels as a peer would, without moving KV."""

import uuid
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from pdrelay_connector.core.doctor.examination import shortened
from pdrelay_connector.core.doctor.finding import Finding, refusal
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.shape_checks import difference
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint, Welcome
from pdrelay_connector.core.session.handshake import HandshakeClient
from pdrelay_connector.core.session.peers import mismatch
from pdrelay_connector.errors import PeerError
from pdrelay_connector.io.connect import open_connection
from pdrelay_connector.io.secrets import secrets_in_force
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.settings import Settings

UNNAMED: Final = EngineId("pdrelay-doctor")  # no engine is called so
# core/session/handshake.py; it comes after the secret was right
OTHER_NAME: Final = "does not answer here (any more)"


class EngineFacts(msgspec.Struct, kw_only=True):
    """What an engine's side channel has shown."""

    address: str
    engine: str = ""  # id, as it was given; "": none was
    failure: str = ""
    is_secret_right: bool = False
    fingerprint: Fingerprint | None = None  # absent without the id, or if it refused
    ranks: int = 0  # tensor-parallel size
    stages: int = 0
    memory: str = ""
    layers: int = 0  # regions of the first rank
    block_size: int = 0  # tokens
    blocks: int = 0


def look_at(
    engine: str, address: Address, settings: Settings
) -> tuple[EngineFacts, Welcome | None]:
    """Connect as a decode engine does, read the Welcome if it comes, and hang up."""
    facts = EngineFacts(address=str(address), engine=engine)
    client = HandshakeClient(EngineId(f"pdrelay-doctor-{uuid.uuid4()}"), secrets_in_force(settings))
    expects = EngineId(engine) if engine else UNNAMED
    try:
        encrypted, welcome = open_connection(
            address, expects, client, Tls(settings), timeout=settings.handshake_timeout
        )
    except PeerError as exc:
        facts.is_secret_right = OTHER_NAME in str(exc)
        facts.failure = "" if facts.is_secret_right and not engine else shortened(str(exc))
        return facts, None
    encrypted.close()
    facts.is_secret_right = True
    if welcome.protocol != PROTOCOL or not welcome.ranks:
        facts.failure = (
            f"it speaks protocol {welcome.protocol} and shows {len(welcome.ranks)} ranks"
        )
        return facts, None
    rank = welcome.ranks[0]
    region = welcome.ranks[0].regions[0]
    facts.fingerprint = welcome.fingerprint
    facts.ranks = rank.ranks
    facts.stages = rank.stages
    facts.memory = rank.memory
    facts.layers = len(rank.regions)
    facts.block_size = region.block_size
    facts.blocks = region.blocks
    return facts, welcome


def diagnose_engines(looks: Sequence[tuple[EngineFacts, Welcome | None]]) -> list[Finding]:
    """Return findings that keep peers from an engine, or two engines from each other."""
    findings = [refusal(facts.failure) for facts, _ in looks if facts.failure]
    reached = [(facts, welcome) for facts, welcome in looks if welcome is not None]
    for (engine, ours), (other_engine, theirs) in pairwise(reached):
        if reason := mismatch(ours.fingerprint, theirs.fingerprint) or difference(
            ours.ranks, theirs.ranks
        ):
            findings.append(
                Finding(
                    "fingerprint",
                    f"the engines at {other_engine.address} and {engine.address} refuse each other: of "
                    f"{other_engine.address}, {reason}",
                    "start both with the same vLLM, model, revision, types and connector mode",
                )
            )
    return findings
