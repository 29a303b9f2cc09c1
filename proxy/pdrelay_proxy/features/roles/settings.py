"""The settings of the controller of roles."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdrelay_proxy.declarations import Count, Group, Seconds

ROLES: Final = Group("roles of engines")


class RolesMode(StrEnum):
    """Whether the router decides which engines are prefill and which are decode engines."""

    OFF = "off"
    DRY_RUN = "dry-run"  # it only logs and shows its decisions
    AUTO = "auto"  # engines change their roles


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """The choices, in the order of ``--help``."""

    # fmt: off
    roles: RolesMode = ROLES.option(RolesMode.OFF,
        "auto: engines change between prefill and decode with the load; dry-run: the router only says which one "
        "would")
    target_ttft_s: Seconds | None = ROLES.option(None, "time to first token that --roles tries to keep")
    target_itl_s: Seconds | None = ROLES.option(None, "mean time between two tokens that --roles tries to keep")
    min_prefill: Count = ROLES.option(1, "fewest prefill engines that --roles leaves")
    min_decode: Count = ROLES.option(1, "fewest decode engines that --roles leaves")
    decode_slots: Count | None = ROLES.option(None,
        "requests that a decode engine serves at the same time (its --max-num-seqs)", unset="unknown")
    turns_per_hour: Count = ROLES.option(6, "most role changes in an hour")
    roles_interval_s: Seconds = ROLES.option(5.0, "time between two looks at the load of all engines")
    # fmt: on


SETTINGS: Final = RoleSettings
