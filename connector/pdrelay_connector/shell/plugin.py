"""The entry point ``vllm.general_plugins``: registers the connector by its name."""

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "PDRelayConnector"


def register() -> None:
    """Register :class:`~pdrelay_connector.PDRelayConnector` with vLLM.

    The first engine that uses it imports it.

    vLLM calls this in all its processes (``vllm/plugins/__init__.py``), and the connector's own
    module once more: with a module path and ``VLLM_PLUGINS`` the entry point may not run, and
    MultiConnector looks its children up by name.
    """
    with suppress(ValueError):  # its only cause: this process has registered the name already
        KVConnectorFactory.register_connector(NAME, "pdrelay_connector", NAME)
