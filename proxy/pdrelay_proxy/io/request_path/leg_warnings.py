"""Failures of legs that an operator alone can mend, in the log: once an hour for each engine."""

import logging
from collections.abc import Mapping
from typing import Final

from pdrelay_proxy.core.model import Instance, InstanceId
from pdrelay_proxy.core.protocol.fault_table import Failure

logger = logging.getLogger(__name__)
_WARNINGS: Final[Mapping[Failure, str]] = {
    Failure.WRONG_KEY: "%(engine)s wants another API key than this router shows to it "
    "(PDRELAY_%(pool)s_API_KEY)",
    Failure.NO_KV_PARAMS: "%(engine)s has answered without KV of the prompt (it keeps as much as it "
    "may, or has no connector that sends KV), or without its model's name where a request named "
    "none: another prefill engine, or a decode engine alone, serves such requests",
}
_AGAIN_S: Final = 3600.0


class LegWarnings:
    """Those of one router. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._warned_at: dict[tuple[InstanceId, Failure], float] = {}

    def leg_failed(self, instance: Instance, failure: Failure, now: float) -> None:
        """Warn of a failure that has a warning, unless that was done not long ago."""
        if failure not in _WARNINGS:
            return
        key = instance.id, failure
        warned_at = self._warned_at.get(key)
        if warned_at is None or now >= warned_at + _AGAIN_S:
            self._warned_at[key] = now
            words = {"engine": instance.id, "pool": instance.pool.upper()}
            logger.warning(_WARNINGS[failure], words)

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget removed instances."""
        self._warned_at = {key: at for key, at in self._warned_at.items() if key[0] in instances}
