"""The connector under the names of vLLM's own, for programs that look at the name.

With ``"kv_connector_module_path": "pdrelay_connector.nixl"`` vLLM takes the class from here and not
from its registry (``KVConnectorFactory.get_connector_class``). The name decides the mode, as it
does for vLLM's: see :data:`pdrelay_connector.settings.MODE_OF_NAME`.

They are one class and no subclasses: MultiConnector finds the class of a child's numbers by
``__name__`` in the registry, where these names are vLLM's.
"""

from pdrelay_connector.shell.connector import PDRelayConnector

NixlConnector = NixlPullConnector = NixlPushConnector = PDRelayConnector

__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]
