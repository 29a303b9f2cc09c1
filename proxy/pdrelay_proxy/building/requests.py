"""Builds the request path."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pdrelay_proxy.api.model_list import ModelCatalog
from pdrelay_proxy.building.engines import EngineSide
from pdrelay_proxy.core.admission.cache_salts import Salts
from pdrelay_proxy.core.admission.keys import Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime
from pdrelay_proxy.core.client_ids import ClientIds
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.http.allowed_origins import AllowedOrigins
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.core.protocol.push import TRANSFER_POLICIES
from pdrelay_proxy.core.protocol.stream_opening import StreamOpenings
from pdrelay_proxy.core.routing.retries import RetryBudget
from pdrelay_proxy.core.routing.session_ids import SessionIds
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import client_keys
from pdrelay_proxy.io.request_path.good_legs import GoodLegs, count_legs
from pdrelay_proxy.io.request_path.ids import new_id, new_transfer
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.io.request_path.telemetry import HearEnded, Telemetry
from pdrelay_proxy.requests.body_reader import BodyReader
from pdrelay_proxy.requests.claims import CallClaims
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.intake import Intake
from pdrelay_proxy.requests.leg_bodies import LegBodies
from pdrelay_proxy.requests.release import Releaser
from pdrelay_proxy.requests.request_set import MakeWatcher, RequestSet
from pdrelay_proxy.requests.services import LiveSettings, Services, Spans
from pdrelay_proxy.settings import PolicyName, Settings

PATHS: Final = frozenset({*ENDPOINTS, "/v1/models"})  # paths with metrics and spans of their own


@dataclass(frozen=True, slots=True)
class RequestSide:
    """The request path, and its state."""

    requests: RequestSet
    fleet: LiveFleet
    gate: Gate
    lifetime: Lifetime
    keyring: Keyring
    models: ModelCatalog
    telemetry: Telemetry
    releaser: Releaser
    reader: BodyReader


def build_requests(
    settings: Settings,
    engines: EngineSide,
    fleet: LiveFleet,
    clock: Callable[[], float],
    *,
    ended: Sequence[HearEnded] = (),
    spans: Spans | None = None,
    claims: CallClaims | None = None,
    openings: StreamOpenings,
    watchers: Sequence[MakeWatcher] = (),
) -> RequestSide:
    """Build it. Raises ConfigError.

    ``ended``: observers of requests that are over; ``claims``: requests that a feature answers;
    ``openings``: of streams, before a decode engine has answered; ``watchers``: make what looks at
    all requests, behind each look at their deadlines.
    """
    wire = engines.wire
    gate = Gate(settings, clock, has_other_routers=engines.has_other_routers)
    lifetime = Lifetime()
    keyring = Keyring(client_keys(settings))
    reader = BodyReader()
    counters = _counters(engines, fleet)
    telemetry = Telemetry(counters, clock, later=fleet.later, stepped=fleet.stepped, ended=ended)
    releaser = Releaser(wire, listeners=(telemetry,))
    sites = Sites(settings, socket.gethostname())
    salts = _salts(settings, keyring)
    services = Services(
        intake=Intake(
            settings,
            lifetime,
            keyring,
            sites,
            salts,
            _sessions(settings),
            _media_hosts(settings),
            engines.registry.models.of_unnamed,
        ),
        fleet=fleet,
        push_coordinates=engines.learned,
        leg_bodies=LegBodies(
            engines.learned, TRANSFER_POLICIES[settings.kv_transfer_mode], telemetry.replaced_host
        ),
        sender=wire.leg_sender,
        releaser=releaser,
        budget=RetryBudget(settings.retry_budget_ratio),
        gate=gate,
        lifetime=lifetime,
        body_reader=reader,
        telemetry=telemetry,
        good_legs=GoodLegs(telemetry.later, partial(count_legs, fleet, telemetry)),
        settings=LiveSettings(settings),
        clock=clock,
        new_id=new_id,
        new_transfer=new_transfer,
        ids=ClientIds(settings.request_id_headers),
        origins=AllowedOrigins(settings.allowed_origins) if settings.allowed_origins else None,
        reports=settings.load_reports
        and settings.prefill_policy != PolicyName.ROUND_ROBIN
        and not engines.has_other_routers,
        openings=openings,
        spans=spans,
    )
    engines.registry.tell_departures(services.engine_left)
    requests = RequestSet(services, claims, watchers)
    models = ModelCatalog(engines.registry, wire, clock)
    return RequestSide(
        requests, fleet, gate, lifetime, keyring, models, telemetry, releaser, reader
    )


def _counters(engines: EngineSide, fleet: LiveFleet) -> Counters:
    """Return the counters, including those of engines' choice and connections."""
    return Counters(
        PATHS,
        lone_prompts_bound=fleet.bounds,
        engine_tls_failures=engines.tls.failures,
        turns=engines.registry.departures.turns,
    )


def _salts(settings: Settings, keyring: Keyring) -> Salts | None:
    """Return what keeps clients apart in engines' prefix caches; raises ConfigError."""
    wanted = settings.cache_salt_per_key
    if wanted is False:
        return None
    if wanted and settings.api_keys_file is None:
        raise ConfigError(
            "cache_salt_per_key needs api_keys_file: without keys all clients are one"
        )
    return Salts(keyring, settings.cache_salt_secret, always=bool(wanted))


def _media_hosts(settings: Settings) -> frozenset[str]:
    return frozenset(map(str.lower, settings.allowed_media_domains))


def _sessions(settings: Settings) -> SessionIds | None:
    """Return the places of sessions' ids; None: no policy uses them, so no request is searched."""
    by_session = PolicyName.SESSION in (settings.prefill_policy, settings.decode_policy)
    return SessionIds(settings.session_names) if by_session else None
