"""Looks at an engine that is added, before its first probe: whether it is one, and whether it
shares a request with any other.
"""

import asyncio

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.lone_engines import lone_engines_in_steps
from pdrelay_proxy.core.fleet.pair_history import PairHistory
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.errors import NotAccepted
from pdrelay_proxy.io.probes.checks import HttpChecks, ProbeFailed, ProbeOfRouter


class Newcomers:
    """Answers for one router."""

    def __init__(
        self,
        registry: Registry,
        checks: HttpChecks,
        history: PairHistory,
        *,
        patience_s: float,
    ) -> None:
        self._registry = registry
        self._checks = checks
        self._history = history
        self._patience_s = patience_s  # for all that an engine says: an operator waits for it

    async def check(self, candidate: Instance) -> None:
        """Accept what may be an engine; what else is wrong with it, its probes will say.

        It gets no key before it is accepted. Raises NotAccepted: a router is there.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._checks.touch(candidate)
        except ProbeOfRouter as found:
            raise NotAccepted(f"{candidate.id} {found}") from found
        except (ProbeFailed, TimeoutError):
            return

    async def warning(self, role: Role, address: Address) -> str | None:
        """Say why an engine that is known by now shares no request; None: it may, as far as it
        tells of itself.

        Of its data-parallel ranks the first is asked: they differ in nothing that counts here.
        """
        instance = next(
            (lone_kind for lone_kind in self._registry.known(role) if lone_kind.address == address),
            None,
        )
        if instance is None:
            return None
        try:
            async with asyncio.timeout(self._patience_s):
                facts = await self._checks.facts(instance)
        except (ProbeFailed, TimeoutError):  # its probes will say so
            return None
        self._registry.learn(instance.id, facts)
        lone = finish(lone_engines_in_steps(self._registry, self._history))
        return next(
            (lone_kind.text for lone_kind in lone if instance.id in lone_kind.engines), None
        )
