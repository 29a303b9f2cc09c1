"""What can be changed while the router serves: engines, keys and limits, all of them or, if one is wrong, none."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.keys import Keyring, Outbound
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.http.origins import check_open
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import AlreadyKnown, ConfigError
from pdrelay_proxy.io.files import (
    admin_tls,
    client_keys,
    engine_keys,
    engine_tls,
    join_key,
    operator_key,
    server_tls,
)
from pdrelay_proxy.io.peers import check_peers
from pdrelay_proxy.io.reloads import half_written, key_stamps
from pdrelay_proxy.io.worker_place import check_workers
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.services import LiveSettings
from pdrelay_proxy.settings import CACHE_POLICIES, KvEvents, QueueOrder, RolesMode, Settings

logger = logging.getLogger(__name__)
_ENGINE_KEYS: Final = {"prefill_api_key_file": Role.PREFILL, "decode_api_key_file": Role.DECODE}
T = TypeVar("T")
_Addresses: TypeAlias = Mapping[Role, Mapping[str, Target]]


@dataclass(frozen=True, slots=True)
class Live:
    """The objects that a change concerns."""

    registry: Registry
    settings: LiveSettings
    gate: Gate
    keyring: Keyring
    outbound: Outbound
    admin_key: AdminKey
    join_key: AdminKey
    clock: Callable[[], float]  # seconds; only differences count

    def prepared(self, old: Settings, new: Settings) -> Callable[[], None]:
        """Check a change, and return what makes it: nothing can be wrong with it any more.

        Engines that were added by hand stay, whatever the settings say. One that is no longer listed gets nothing new,
        and is forgotten when it has nothing left.

        Raises:
            ConfigError: something is wrong with the new settings.
            AddressError: an address cannot be one.
        """
        stamps = key_stamps(new)
        keys, shown, admin_key = client_keys(new), engine_keys(new), operator_key(new)
        join = join_key(new)
        half = {name for name in half_written(new, stamps) if getattr(old, name) == getattr(new, name)}
        if "api_keys_file" in half:
            keys = _kept("api_keys_file", keys, self.keyring.keys)
        for name, role in _ENGINE_KEYS.items():
            if name in half and (known := self.outbound.key_of(role)) is not None:
                shown[role] = _kept(name, shown[role], known)
        if "admin_key_file" in half:
            admin_key = _kept("admin_key_file", admin_key, self.admin_key.text)
        if "join_key_file" in half:
            join = _kept("join_key_file", join, self.join_key.text)
        check(new)
        before, after = addresses_of(old), addresses_of(new)

        def change() -> None:
            self.keyring.keys, self.keyring.least = keys, new.min_priority
            self.outbound.change(shown)
            self.admin_key.change(admin_key)
            self.join_key.change(join)
            self.gate.change(new)
            self.settings.current = new
            self._exchange(before, after)

        return change

    def _exchange(self, before: _Addresses, after: _Addresses) -> None:
        for role in Role:
            gone = {authority for authority, _ in before[role].items() - after[role].items()}
            for member in self.registry.members():  # also those that have turned: the settings name what they were
                one = member.instance
                if one.pool is role and one.address.authority in gone:
                    self.registry.retire(one.id, now=self.clock())
                    logger.info("%s is no longer listed: it is drained, and then forgotten", one.id)
            for authority, target in after[role].items():
                if before[role].get(authority) == target:
                    continue
                try:
                    added = self.registry.add_target(role, target, now=self.clock())
                except AlreadyKnown as exc:  # by hand, before, or as a pod
                    logger.info("%s", exc)
                    self.registry.claim(role, authority)
                else:
                    for instance in added:
                        logger.info("%s is at %s", instance.id, target.address.url)


def _kept(name: str, read: T, known: T) -> T:
    """Return what was read from a file before it may have been half written; io/reloads.py reads it once it rests."""
    if read != known:
        said = "%s has no line break at its end, or is being written: what was read before stays until it rests"
        logger.warning(said, name)
    return known


def check(settings: Settings) -> None:
    """Raise ConfigError if the router would be open to others, or two settings contradict each other."""
    for look in _CHECKS:
        look(settings)


def faults(settings: Settings) -> Sequence[str]:
    """Return what ``check`` would raise and what is wrong with the files of the settings: all of it, each once."""
    found = dict[str, None]()
    for look in (*_CHECKS, *_FILES):
        try:
            look(settings)
        except ConfigError as exc:
            found[str(exc)] = None
    return [*found]


def _check_limits(settings: Settings) -> None:
    if settings.max_inflight_bytes < settings.max_body_bytes:
        raise ConfigError(
            f"max_inflight_bytes is {settings.max_inflight_bytes}, and one body may have {settings.max_body_bytes} "
            "(max_body_bytes): write at least that"
        )


def _check_key_limits(settings: Settings) -> None:
    of_keys = settings.max_key_concurrency, settings.max_key_rate, settings.max_key_tokens_per_minute
    if settings.api_keys_file is None and any(of_keys):
        raise ConfigError(
            "max_key_concurrency, max_key_rate and max_key_tokens_per_minute need api_keys_file: "
            "without keys all clients are one"
        )


def _check_shared_limits(settings: Settings) -> None:
    if settings.share_limits and not settings.peers:
        raise ConfigError("share_limits needs peers: routers that do not know each other share nothing")


def _check_queue_order(settings: Settings) -> None:
    if settings.api_keys_file is None and settings.queue_order is QueueOrder.FAIR:
        raise ConfigError("queue_order fair needs api_keys_file: without keys all clients are one")


def _check_moves(settings: Settings) -> None:
    if settings.move_above is not None and not settings.resume_streams:
        raise ConfigError(
            f"move_above is {settings.move_above:g}, and no stream could move: write resume_streams = true, too"
        )


def _check_caches(settings: Settings) -> None:
    policies = {settings.prefill_policy, settings.decode_policy}
    if settings.kv_events is KvEvents.AUTO and policies.isdisjoint(CACHE_POLICIES):
        raise ConfigError(
            "kv_events is auto, and no policy asks for it: write prefill_policy or decode_policy prefix, "
            "or both expected_ttft"
        )


def _check_pods(settings: Settings) -> None:
    if settings.kubernetes_selector is not None and settings.kubernetes_inference_pool is not None:
        raise ConfigError("kubernetes_inference_pool has a selector of its own: leave out kubernetes_selector")


def _check_decode_itl(settings: Settings) -> None:
    if settings.max_decode_itl_s and settings.decode_policy not in CACHE_POLICIES:
        raise ConfigError(
            "max_decode_itl_s needs decode_policy expected_ttft or prefix: no other knows what decode engines have to "
            "compute of a prompt"
        )


def check_admin_port(settings: Settings) -> None:
    """Raise ConfigError if the settings of the admin port contradict those of the main one, or have no port."""
    if settings.admin_port is None:
        given = [name for name in ("admin_host", "admin_tls_cert", "admin_tls_key") if getattr(settings, name)]
        if given:
            raise ConfigError(f"{given[0]} is set, and admin_port is not: write the port, or leave {given[0]} out")
        return
    hosts = {settings.host, settings.admin_host or settings.host}
    if len(hosts) > 1 and not hosts & {"0.0.0.0", "::"}:
        return
    if settings.admin_port == settings.port != 0:
        raise ConfigError(f"port and admin_port are both {settings.port}: write two")
    last = settings.admin_port + settings.workers - 1
    if settings.admin_port and settings.admin_port < settings.port <= last:
        raise ConfigError(
            f"port is {settings.port}, and the admin ports of {settings.workers} workers are {settings.admin_port} to "
            f"{last}: write an admin_port that leaves it out"
        )


def addresses_of(settings: Settings) -> _Addresses:
    """Return the engines by host:port; raises AddressError, or ConfigError: one occurs twice under one role."""
    found: dict[Role, dict[str, Target]] = {role: {} for role in Role}
    for role, texts in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for target in map(Target.parse, texts):
            name = target.address.authority
            if name in found[role]:
                raise ConfigError(f"{name} stands twice among the {role} engines: name each once")
            found[role][name] = target
    return found


def _check_roles(settings: Settings) -> None:
    if settings.roles is not RolesMode.OFF and (settings.target_ttft_s is None or settings.target_itl_s is None):
        raise ConfigError(
            f"roles is {settings.roles}, and what is wanted is not known: write target_ttft_s and target_itl_s"
        )
    if settings.roles is RolesMode.AUTO and settings.peers and settings.store == "memory":
        raise ConfigError(
            "roles is auto, and several routers (peers) would decide at the same time, because store is memory: write "
            "kubernetes:CONFIGMAP, redis://... or file:PATH"
        )


# Each raises ConfigError.
_CHECKS: Final[Sequence[Callable[[Settings], object]]] = (
    check_open,
    check_workers,
    check_admin_port,
    _check_limits,
    _check_key_limits,
    _check_shared_limits,
    _check_queue_order,
    check_peers,
    _check_roles,
    _check_moves,
    _check_caches,
    _check_pods,
    _check_decode_itl,
)
_FILES: Final[Sequence[Callable[[Settings], object]]] = (
    addresses_of,
    client_keys,
    engine_keys,
    operator_key,
    join_key,
    server_tls,
    admin_tls,
    engine_tls,
)
