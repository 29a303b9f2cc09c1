"""A vLLM KV connector that moves prefill KV blocks to decode engines over NIXL.

vLLM loads it with ``kv_connector="PDRelayConnector"``: :mod:`pdrelay_connector.shell.plugin`
registers that name. With ``kv_connector_module_path="pdrelay_connector"`` it does without the entry
point. Importing the package itself loads neither vLLM nor torch, so that everything below
:mod:`pdrelay_connector.shell` is testable anywhere.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdrelay_connector.shell.connector import PDRelayConnector

__all__ = ["PDRelayConnector"]


def __getattr__(name: str) -> object:
    if name == "PDRelayConnector":
        from pdrelay_connector.shell.connector import PDRelayConnector  # noqa: PLC0415 -- the point of this function

        return PDRelayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
