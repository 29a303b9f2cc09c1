"""Puts the controller of roles into a router."""

import secrets
import socket
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Final

from pdrelay_proxy.core.model import EngineRole, InstanceId, Role
from pdrelay_proxy.core.ports import SharedText
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import has_other_routers, shared_store
from pdrelay_proxy.features.feature import Core, Feature, FeatureParts
from pdrelay_proxy.features.roles.leased_role_changes import LeasedRoleChanges
from pdrelay_proxy.features.roles.memory_text import MemoryText
from pdrelay_proxy.features.roles.role_board import RoleBoard
from pdrelay_proxy.features.roles.role_controller import RoleController, RoleLimits
from pdrelay_proxy.features.roles.role_lease import LASTS_S
from pdrelay_proxy.features.roles.role_watch import RoleWatch
from pdrelay_proxy.features.roles.settings import RoleSettings, RolesMode
from pdrelay_proxy.features.roles.work_meter import RoleTargets
from pdrelay_proxy.io.background import Running
from pdrelay_proxy.settings import Settings


class RolesFeature(Feature):
    """Decides which engines are prefill and which are decode engines."""

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if targets are missing, or several routers cannot agree who decides."""
        chosen = settings.for_feature(RoleSettings)
        if chosen.roles is not RolesMode.OFF and (
            chosen.target_ttft_s is None or chosen.target_itl_s is None
        ):
            raise ConfigError(
                f"roles is {chosen.roles}, and what is wanted is not known: write target_ttft_s "
                f"and target_itl_s"
            )
        # workers have a store in any case
        has_others = settings.workers == 1 and has_other_routers(settings)
        if chosen.roles is RolesMode.AUTO and has_others and shared_store(settings) is None:
            raise ConfigError(
                "roles is auto, and several routers (peers) would decide at the same time, because "
                "store is memory: "
                "write kubernetes:CONFIGMAP, redis://... or file:PATH"
            )

    def parts(self, core: Core) -> FeatureParts:
        """Return the watch's task, and the board's status and metrics."""
        settings = self.ground.settings
        engines = self.ground.engines
        clock = self.ground.clock
        chosen = settings.for_feature(RoleSettings)
        if (
            chosen.roles is RolesMode.OFF
            or chosen.target_ttft_s is None
            or chosen.target_itl_s is None
        ):
            return FeatureParts()
        board = RoleBoard(chosen.roles, chosen.turns_per_hour, clock)
        targets = RoleTargets(chosen.target_ttft_s, chosen.target_itl_s, slots=chosen.decode_slots)
        limits = RoleLimits(
            chosen.min_prefill, chosen.min_decode, turns_per_hour=chosen.turns_per_hour
        )
        text = _text(settings) if chosen.roles is RolesMode.AUTO else None
        admission = core.serving.gate.admission
        watch = RoleWatch(
            engines.registry,
            engines.checks.metrics,
            RoleController(targets, limits),
            board,
            queued=lambda: admission.waiting,
            every_s=chosen.roles_interval_s,
            clock=clock,
            role_changes=None if text is None else _role_changes(core, text, clock),
        )
        closing: tuple[Running, ...] = () if text is None else (partial(aclosing, text),)
        return FeatureParts((*closing, watch.running), status=board.status, families=board.families)


def _text(settings: Settings) -> SharedText:
    """Return the text with the lease of the router that decides."""
    store = shared_store(settings)
    return MemoryText() if store is None else store.text("roles", lasts_s=LASTS_S)


def _role_changes(core: Core, text: SharedText, clock: Callable[[], float]) -> LeasedRoleChanges:
    async def change_role(name: InstanceId, role: Role) -> None:
        await core.discovery.changes.change_role(name, EngineRole(role.value))

    me = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    return LeasedRoleChanges(me, text, change_role, clock=clock, wall=core.wall)


FEATURE: Final = RolesFeature
