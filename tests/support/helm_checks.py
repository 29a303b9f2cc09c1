"""What must be true of rendered objects. Each check returns its complaints, one sentence each; none: all is well.

They are functions of the objects alone, so that tests can also show that each of them notices what it is for.
"""

from support.helm_api import admin_port, discovery, isolation, rbac
from support.helm_links import names, references, selectors
from support.helm_pods import (
    connector_secret,
    drains,
    engine_args,
    engine_tls,
    probes,
    router_args,
    secrets,
    security,
    side_channel,
)  # fmt: skip

CHECKS = {
    check.__name__: check
    for check in (
        names, selectors, references, probes, security, secrets, connector_secret, router_args, engine_args,
        engine_tls, side_channel, drains, rbac, discovery, isolation, admin_port,
    )
}  # fmt: skip


def complaints(objects):
    """Return what all checks say."""
    return [f"{name}: {problem}" for name, check in CHECKS.items() for problem in check(objects)]
