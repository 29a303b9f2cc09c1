"""What can be changed while the router serves: engines, keys and limits, all of them or, if one is
wrong, none.
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
    """The objects that a change concerns."""

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
        """Check a change, and return what makes it: nothing can be wrong with it any more.

        Engines that were added by hand stay, whatever the settings say. One that is no longer
        listed gets nothing new, and is forgotten when it has nothing left.

        Raises:
            ConfigError: something is wrong with the new settings.
            AddressError: an address cannot be one.
        """
        stamps = key_stamps(new)
        keys = client_keys(new)
        shown = engine_keys(new)
        admin_key = operator_key(new)
        join = join_key(new)
        half = {
            name for name in half_written(new, stamps) if getattr(old, name) == getattr(new, name)
        }
        if "api_keys_file" in half:
            keys = _kept("api_keys_file", keys, self.keyring.keys)
        for name, role in _ENGINE_KEYS.items():
            if name in half and (known := self.outbound.key_of(role)) is not None:
                shown[role] = _kept(name, shown[role], known)
        if "admin_key_file" in half:
            admin_key = _kept("admin_key_file", admin_key, self.admin_key.text)
        if "join_key_file" in half:
            join = _kept("join_key_file", join, self.join_key.text)
        self.check(new)
        before = addresses_of(old)
        after = addresses_of(new)

        def change() -> None:
            self.keyring.keys = keys
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
            # also those that have turned: the settings name what they were
            for member in self.registry.members():
                one = member.instance
                if one.pool is role and one.address.authority in gone:
                    self.registry.departures.retire(one.id, now=self.clock())
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
    """Return what was read from a file before it may have been half written; io/reloads.py reads it
    once it rests.
    """
    if read != known:
        said = (
            "%s has no line break at its end, or is being written: what was read before stays "
            "until it rests"
        )
        logger.warning(said, name)
    return known


def addresses_of(settings: Settings) -> _Addresses:
    """Return the engines by host:port; raises AddressError, or ConfigError: one occurs twice under
    one role.
    """
    found: dict[Role, dict[str, Target]] = {role: {} for role in Role}
    for role, texts in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
        for target in map(Target.parse, texts):
            name = target.address.authority
            if name in found[role]:
                raise ConfigError(f"{name} stands twice among the {role} engines: name each once")
            found[role][name] = target
    return found
