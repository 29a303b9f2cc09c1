"""The errors of KV events.

They have a module of their own because it is compiled: compiled classes derive from compiled ones.
"""

from pdrelay_proxy.errors import EngineError


class BadKvEvents(EngineError):
    """An engine's KV events cannot be read, or have gaps."""
