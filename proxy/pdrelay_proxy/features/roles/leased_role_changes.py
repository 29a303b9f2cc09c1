"""Role changes by one router at a time, which records each before it begins."""

import logging
from collections.abc import Awaitable, Callable

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.core.ports import SharedText
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.features.roles.role_lease import LeaseView, RoleHold, RoleLease
from pdrelay_proxy.io.discovery.store import StoreDown

logger = logging.getLogger(__name__)


class LeasedRoleChanges:
    """Changes roles by a lease in a text that all routers share. No method raises."""

    def __init__(
        self,
        me: str,
        text: SharedText,
        change_role: Callable[[InstanceId, Role], Awaitable[None]],
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """``change_role``: begins a role change; raises ProxyError or StoreDown.

        ``wall``: seconds since 1970.
        """
        self._lease = RoleLease(me)
        self._text = text
        self._change_role = change_role
        self._clock = clock
        self._wall = wall
        self._holder: str | None = None  # logged last

    async def hold(self) -> RoleHold:
        """Take or renew the lease, and return who holds it."""
        try:
            view = self._lease.view_of(
                await self._text.read(), now=self._clock(), wall=self._wall()
            )
            holds = view.holds and (view.text is None or await self._written(view))
        except StoreDown as exc:
            return RoleHold(holds=False, trouble=str(exc))
        holder = view.holder if holds == view.holds else ""
        if holder != self._holder:
            logger.info(
                "roles are decided by %s", "this router" if holds else holder or "another router"
            )
            self._holder = holder
        now = self._clock()
        wall = self._wall()
        # The wall clock may have been set back meanwhile: recorded changes are still in the past.
        return RoleHold(holds, holder, tuple(now - max(0.0, wall - at) for at in view.changed_at))

    async def begin(self, name: InstanceId, role: Role, /, *, counts: bool = True) -> str:
        """Record a role change and begin it; return why it did not begin (empty: it did).

        ``counts``: it counts against turns_per_hour.
        """
        try:
            text = await self._text.read()
            now = self._clock()
            wall = self._wall()
            view = self._lease.view_of(text, now=now, wall=wall, turns=True, counts=counts)
            if not view.holds or not await self._written(view):
                return "another router decides on roles"
            await self._change_role(name, role)
        except (StoreDown, ProxyError) as exc:
            return str(exc)
        return ""

    async def _written(self, view: LeaseView) -> bool:
        if view.text is None or not await self._text.replace(view.text):
            return False
        self._lease.written(view, now=self._clock())
        return True
