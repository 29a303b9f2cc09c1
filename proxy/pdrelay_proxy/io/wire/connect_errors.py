"""Why a connection to an engine was not opened: turns the libraries' errors into EngineError."""

import socket

from pdrelay_proxy.core.model import Instance
from pdrelay_proxy.core.protocol.fault_table import unreached
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.wire.engine_tls import EngineTls


def not_opened(instance: Instance, error: Exception, tls: EngineTls | None) -> EngineError:
    """Return the EngineError for an error of a connection attempt: of DNS, of TLS, of the engine's
    machine, or a lack of the router's own (descriptors, ports).
    """
    why = None if tls is None else tls.failure(instance, error)
    number = error.errno if isinstance(error, OSError) else None
    return unreached(instance.id, number, is_name=isinstance(error, socket.gaierror), why=why)
