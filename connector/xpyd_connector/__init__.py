"""A vLLM KV connector that moves prefill KV blocks to decode engines over NIXL.

vLLM loads it with ``kv_connector="XpydConnector"``: :mod:`xpyd_connector.shell.plugin` registers that name. With
``kv_connector_module_path="xpyd_connector"`` it does without the entry point. Importing the package itself loads
neither vLLM nor torch, so that everything below :mod:`xpyd_connector.shell` is testable anywhere.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpyd_connector.shell.connector import XpydConnector

__all__ = ["XpydConnector"]


def __getattr__(name: str) -> object:
    if name == "XpydConnector":
        from xpyd_connector.shell.connector import XpydConnector  # noqa: PLC0415 -- the point of this function

        return XpydConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
