"""Changes while the router serves: engines, keys and limits, all together or, if one is wrong,
none.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.keys import Keyring, Outbound
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import AlreadyKnown, ConfigError
from pdrelay_proxy.io.files import (
    client_keys,
    engine_keys,
    join_key,
    operator_key,
)
from pdrelay_proxy.io.reloads import half_written, key_stamps
from pdrelay_proxy.requests.gate import Gate
from pdrelay_proxy.requests.services import LiveSettings
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
_ENGINE_KEYS: Final = {"prefill_api_key_file": Role.PREFILL, "decode_api_key_file": Role.DECODE}
T = TypeVar("T")
_Addresses: TypeAlias = Mapping[Role, Mapping[str, Target]]


@dataclass(frozen=True, slots=True)
class Live:
    """The objects that a change affects."""

    registry: Registry
    settings: LiveSettings
    gate: Gate
    keyring: Keyring
    outbound: Outbound
    admin_key: AdminKey
    join_key: AdminKey
    clock: Callable[[], float]  # seconds; only differences count
    check: Callable[[Settings], None]  # raises ConfigError

    def prepared(self, old: Settings, new: Settings) -> Callable[[], None]:
        """Check a change, and return a function that makes it, which cannot fail any more.

        Engines that operators added stay, whatever the settings say. One that is no longer listed
        is drained, and then forgotten.

        Raises:
            ConfigError: the new settings are wrong.
            AddressError: an address is not valid.
        """
        stamps = key_stamps(new)
        keys = client_keys(new)
        engine_keys_read = engine_keys(new)
        admin_key = operator_key(new)
        join = join_key(new)
        half = {
            name for name in half_written(new, stamps) if getattr(old, name) == getattr(new, name)
        }
        if "api_keys_file" in half:
            keys = _kept("api_keys_file", keys, self.keyring.keys)
        for name, role in _ENGINE_KEYS.items():
            if name in half and (known := self.outbound.key_of(role)) is not None:
                engine_keys_read[role] = _kept(name, engine_keys_read[role], known)
        if "admin_key_file" in half:
            admin_key = _kept("admin_key_file", admin_key, self.admin_key.text)
        if "join_key_file" in half:
            join = _kept("join_key_file", join, self.join_key.text)
        self.check(new)
        before = addresses_of(old)
        after = addresses_of(new)

        def change() -> None:
            self.keyring.keys = keys
            self.outbound.change(engine_keys_read)
            self.admin_key.change(admin_key)
            self.join_key.change(join)
            self.gate.change(new)
            self.settings.current = new
            self._exchange(before, after)

        return change

    def _exchange(self, before: _Addresses, after: _Addresses) -> None:
        for role in Role:
            gone = {authority for authority, _ in before[role].items() - after[role].items()}
            for authority in gone:
                self.registry.unclaim(role, authority)
            # also engines whose role has changed: the settings name their declared role
            for member in self.registry.members():
                engine = member.instance
                if engine.pool is role and engine.address.authority in gone:
                    self.registry.departures.retire(engine.id, now=self.clock())
                    logger.info(
                        "%s is no longer listed: it is drained, and then forgotten", engine.id
                    )
            for authority, target in after[role].items():
                if before[role].get(authority) == target:
                    continue
                try:
                    added = self.registry.add_target(role, target, now=self.clock())
                except AlreadyKnown as exc:  # an operator added it before, or it is a pod
                    logger.info("%s", exc)
                    self.registry.claim(role, target)
                else:
                    for instance in added:
                        logger.info("%s is at %s", instance.id, target.address.url)


def _kept(name: str, new: T, known: T) -> T:
    """Return the old content of a file that may be half written (io/reloads.py)."""
    if new != known:
        text = (
            "%s has no line break at its end, or is being written: what was read before stays "
            "until it rests"
        )
        logger.warning(text, name)
    return known


def addresses_of(settings: Settings) -> _Addresses:
    """Return the engines by host:port; raises AddressError, or ConfigError: one is there twice."""
    targets: dict[Role, dict[str, Target]] = {role: {} for role in Role}
    for role, texts in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for target in map(Target.parse, texts):
            name = target.address.authority
            if name in targets[role]:
                raise ConfigError(f"{name} stands twice among the {role} engines: name each once")
            targets[role][name] = target
    return targets
