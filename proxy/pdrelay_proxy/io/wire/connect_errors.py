"""Why a connection to an engine was not opened: what the libraries raise becomes an error of ours
here.
"""

import socket

from pdrelay_proxy.core.model import Instance
from pdrelay_proxy.core.protocol.fault_table import unreached
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.wire.engine_tls import EngineTls


def not_opened(instance: Instance, error: Exception, tls: EngineTls | None) -> EngineError:
    """Return what an error says of an engine: its name, its machine or its certificate, or a lack
    of the router's.
    """
    why = None if tls is None else tls.failure(instance, error)
    number = error.errno if isinstance(error, OSError) else None
    return unreached(instance.id, number, is_name=isinstance(error, socket.gaierror), why=why)
