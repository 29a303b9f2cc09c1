"""The entry point ``vllm.general_plugins``: registers the connector, so that its name needs no module path."""

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "XpydConnector"


def register() -> None:
    """Register :class:`~xpyd_connector.XpydConnector` with vLLM. Importing it is left to the first engine that uses it.

    vLLM calls this in all its processes (``vllm/plugins/__init__.py``), and the connector's own module once more: with
    a module path and ``VLLM_PLUGINS`` the entry point may not run, and MultiConnector looks its children up by name.
    """
    with suppress(ValueError):  # its only cause: this process has registered the name already
        KVConnectorFactory.register_connector(NAME, "xpyd_connector", NAME)
